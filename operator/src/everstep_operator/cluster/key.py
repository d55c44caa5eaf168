"""The operator key, from which every job's token is derived; had without the right to read Secrets.

`get secrets` in the operator's namespace would be `get` on whatever else lies there, and a leaked operator token would
leak it all. So the Secret is created blindly and read back by the kubelet: it is mounted as an *optional* volume. The
first operator creates it and works with the key it holds in memory; every later one finds the file.
"""

from __future__ import annotations

import asyncio
import base64
import secrets
from pathlib import Path

import structlog

from everstep_operator.cluster import errors
from everstep_operator.cluster.client import Client
from everstep_operator.cluster.resources import SECRETS

log = structlog.get_logger(__name__)

SECRET_NAME = "everstep-operator-key"  # noqa: S105
KEY_BYTES = 32
_FILE = "key"


class KeyUnavailable(Exception):
    """Another process made the key and the kubelet never showed it to us."""


def read(folder: Path) -> bytes | None:
    """The mounted key, or None while there is none. A file of another length is a half-made Secret: refuse it."""
    try:
        key = (folder / _FILE).read_bytes()
    except FileNotFoundError:
        return None
    if len(key) != KEY_BYTES:
        raise KeyUnavailable(f"{folder / _FILE} has {len(key)} bytes, not {KEY_BYTES}: delete Secret {SECRET_NAME}")
    return key


async def load_or_create(client: Client, namespace: str, folder: Path, *, patience: float = 180.0) -> bytes:
    """The key. Waits up to `patience` seconds where another operator has created it a moment ago (the kubelet
    refreshes optional volumes every 60 to 90 s)."""
    if (key := read(folder)) is not None:
        return key
    key = secrets.token_bytes(KEY_BYTES)
    body = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": SECRET_NAME, "labels": {"app.kubernetes.io/managed-by": "everstep"}},
        "immutable": True,
        "type": "Opaque",
        "data": {_FILE: base64.b64encode(key).decode()},
    }
    try:
        await client.create(SECRETS, namespace, body)
    except errors.AlreadyExists:
        log.info("the operator key exists already; waiting for the kubelet to mount it", secret=SECRET_NAME)
    except (errors.Unreachable, errors.ServerError) as error:
        # It may have been stored, and we may not read it back to see. Only the mounted file settles what the key is.
        log.warning("whether the operator key was created is unknown; waiting for it to be mounted", error=str(error))
    else:
        log.info("created the operator key", secret=SECRET_NAME, namespace=namespace)
        return key
    return await _mounted(folder, patience)


async def _mounted(folder: Path, patience: float) -> bytes:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + patience
    while (key := read(folder)) is None:
        if loop.time() >= deadline:
            raise KeyUnavailable(
                f"Secret {SECRET_NAME} exists but was not mounted at {folder} within {patience:.0f} s: "
                "mount it as an optional volume of the operator's pod, or delete the Secret to have a new one made"
            )
        await asyncio.sleep(min(1.0, patience / 10))
    return key
