"""Checks that the fields of a pod template that the API passes through have the shape that the planner reads.

The API server judges all the others. These it would be asked about too late: a plan that stumbles over one is no plan,
and nobody would be told.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_TEXT, _OBJECT, _LIST = "a string", "an object", "a list of objects"


def find_misshapen_field(overlay: Mapping[str, Any]) -> str | None:
    """Return what is wrong with the first such field of a podTemplate.spec, or None."""
    for field, value, wanted in _list_typed_fields(overlay):
        if value is not None and not _has_type(value, wanted):
            return f"podTemplate.spec.{field} must be {wanted}, not {value!r:.100}"
    return None


def _list_typed_fields(overlay: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """Yield (path, value, shape), from the outside in: what is checked first may be relied on by what follows."""
    yield "serviceAccount", overlay.get("serviceAccount"), _TEXT
    yield "priorityClassName", overlay.get("priorityClassName"), _TEXT
    yield from _list_affinity_fields(overlay.get("affinity"))
    yield from _list_security_fields("", overlay.get("securityContext"))
    yield "securityContext.sysctls", (overlay.get("securityContext") or {}).get("sysctls"), _LIST
    for number, sysctl in enumerate((overlay.get("securityContext") or {}).get("sysctls") or ()):
        yield f"securityContext.sysctls[{number}].name", sysctl.get("name"), _TEXT
    for volume in overlay.get("volumes") or ():
        path = f"volumes[{volume['name']}].projected"
        yield path, volume.get("projected"), _OBJECT
        yield f"{path}.sources", (volume.get("projected") or {}).get("sources"), _LIST
    for kind in ("containers", "initContainers", "ephemeralContainers"):
        yield kind, overlay.get(kind), _LIST
        for place, container in enumerate(overlay.get(kind) or ()):
            path = f"{kind}[{container.get('name', place)}]"
            yield from _list_security_fields(f"{path}.", container.get("securityContext"))
            capabilities = (container.get("securityContext") or {}).get("capabilities")
            yield f"{path}.securityContext.capabilities", capabilities, _OBJECT
            for verb in ("add", "drop"):
                named = (capabilities or {}).get(verb)
                for number, name in enumerate(named if isinstance(named, list) else ()):
                    yield f"{path}.securityContext.capabilities.{verb}[{number}]", name, _TEXT
            yield f"{path}.ports", container.get("ports"), _LIST
            yield f"{path}.volumeMounts", container.get("volumeMounts"), _LIST
            for mount in container.get("volumeMounts") or ():
                yield f"{path}.volumeMounts.mountPath", mount.get("mountPath"), _TEXT
                yield f"{path}.volumeMounts.name", mount.get("name"), _TEXT


def _list_affinity_fields(affinity: Any) -> Iterator[tuple[str, Any, str]]:
    """Yield the fields on the way to the terms that nodes are excluded by."""
    path, found = "affinity", affinity
    for field in ("nodeAffinity", "requiredDuringSchedulingIgnoredDuringExecution"):
        yield path, found, _OBJECT
        path, found = f"{path}.{field}", (found or {}).get(field)
    yield path, found, _OBJECT
    terms = (found or {}).get("nodeSelectorTerms")
    yield f"{path}.nodeSelectorTerms", terms, _LIST
    for number, term in enumerate(terms or ()):
        yield f"{path}.nodeSelectorTerms[{number}].matchFields", term.get("matchFields"), _LIST


def _list_security_fields(path: str, context: Any) -> Iterator[tuple[str, Any, str]]:
    """Yield the fields that the security contexts of a pod and of a container have alike."""
    yield f"{path}securityContext", context, _OBJECT
    for field in ("seccompProfile", "appArmorProfile", "seLinuxOptions", "windowsOptions"):
        below = (context or {}).get(field)
        yield f"{path}securityContext.{field}", below, _OBJECT
        for name in ("type", "user", "role"):
            yield f"{path}securityContext.{field}.{name}", (below or {}).get(name), _TEXT


def _has_type(value: Any, wanted: str) -> bool:
    if wanted == _LIST:
        return isinstance(value, list) and all(isinstance(item, Mapping) for item in value)
    return isinstance(value, str if wanted == _TEXT else Mapping)
