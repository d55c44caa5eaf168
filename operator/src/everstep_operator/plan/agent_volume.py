"""The volume from which a pod's agent reads its code, job.json and its token.

One projected volume: its sources are one field to the API server's bookkeeping (`managedFields`), whereas three volumes
and their mounts were a tenth of a pod. Templates that older operators have frozen, and the pods that come of them, have
the three: everything here reads both.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

VOLUME, FOLDER = "everstep-agent", "/opt/everstep/agent"
_CONFIG_VOLUME = "everstep-config"  # of plain mode: no agent, but the files of the template's ConfigMap
_JOB = "job.json"
_OLD_JOB, _OLD_TOKEN = "everstep-job", "everstep-token"
_UID_DIGITS = 8


def make_template_name(job: str, uid: str, epoch: int) -> str:
    """Return the name of the ConfigMap that keeps the template of an epoch.

    Kubelets read what is immutable once, and believe it for as long as any pod on their node mounts something of that
    name. A job that is applied while pods of a former one of its name still stop would run what that one ran.

    Args:
        job: Name of the job.
        uid: UID of the job: a former job of the same name has other ConfigMaps.
        epoch: The template epoch.

    Returns:
        `<job>-<epoch>-` and 8 hexadecimal digits. Older operators left out the digits.
    """
    return f"{job}-{epoch}-{hashlib.sha256(uid.encode()).hexdigest()[:_UID_DIGITS]}"


def build_agent_volume(*, agent: str, template: str, token: str) -> dict[str, Any]:
    """Return the volume, with `agent.pyz`, `job.json`, `token` and `pod-uid` side by side.

    Args:
        agent: Name of the ConfigMap with the agent's code.
        template: Name of the template's ConfigMap.
        token: Name of the Secret.
    """
    # One file of each, by its name: whoever may write ConfigMaps could give one a key that hides another's file.
    sources = [
        {"configMap": {"name": template, "items": [{"key": _JOB, "path": _JOB}]}},
        {"configMap": {"name": agent, "items": [{"key": "agent.pyz", "path": "agent.pyz"}]}},
        {"secret": {"name": token, "items": [{"key": "token", "path": "token", "mode": 0o440}]}},
        {"downwardAPI": {"items": [{"path": "pod-uid", "fieldRef": {"fieldPath": "metadata.uid"}}]}},
    ]
    return {"name": VOLUME, "projected": {"sources": sources}}


def find_token_secret(spec: Mapping[str, Any]) -> str:
    """Return the name of the Secret that a pod mounts as its token, or nothing if it mounts none.

    Args:
        spec: The pod's.
    """
    for volume in spec.get("volumes") or ():
        if volume.get("name") == _OLD_TOKEN:
            return str((volume.get("secret") or {}).get("secretName") or "")
        if volume.get("name") == VOLUME:
            for source in _list_sources(volume):
                if name := (source.get("secret") or {}).get("name"):
                    return str(name)
    return ""


def find_agent_config_map(spec: Mapping[str, Any]) -> str:
    """Return the name of the ConfigMap with the agent that a pod runs, or nothing if it runs none.

    Args:
        spec: The pod's.
    """
    for volume in spec.get("volumes") or ():
        if volume.get("name") == VOLUME:
            for source in (volume, *_list_sources(volume)):
                found = source.get("configMap") or {}
                if found.get("name") and all(item.get("key") != _JOB for item in found.get("items") or ()):
                    return str(found["name"])
    return ""


def find_template_config_map(spec: Mapping[str, Any], job: str) -> tuple[str, str] | None:
    """Return the name of the template's ConfigMap that a pod mounts, and the epoch in it; None if it mounts none.

    Args:
        spec: The pod's.
        job: Name of the job.
    """
    for name in _list_config_maps(spec) if job else ():
        epoch, dash, digits = name.removeprefix(f"{job}-").partition("-")
        is_whole = len(digits) == _UID_DIGITS if dash else name != epoch
        if name.startswith(f"{job}-") and epoch.isdecimal() and is_whole:
            return name, epoch
    return None


def _list_config_maps(spec: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of ConfigMaps of which one is the template's: the first with such a name is."""
    for volume in spec.get("volumes") or ():
        name = volume.get("name")
        # An older pod's own volume for the agent comes before that of a job that is called `everstep-agent`.
        sources = [volume] if name in (_OLD_JOB, _CONFIG_VOLUME) else []
        if sources or name == VOLUME:
            for source in (*sources, *_list_sources(volume)):
                yield str((source.get("configMap") or {}).get("name") or "")


def _list_sources(volume: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return (volume.get("projected") or {}).get("sources") or []
