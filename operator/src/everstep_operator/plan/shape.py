"""Whether the fields of a pod template that the API passes through have the shape that the planner reads.

The API server judges all the others. These it would be asked about too late: a plan that stumbles over one is no plan,
and nobody would be told.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_TEXT, _OBJECT, _LIST = "a string", "an object", "a list of objects"


def misshapen(over: Mapping[str, Any]) -> str | None:
    """What is wrong with the first such field of a podTemplate.spec; None: nothing."""
    for field, value, wanted in _read(over):
        if value is not None and not _is(value, wanted):
            return f"podTemplate.spec.{field} must be {wanted}, not {value!r:.100}"
    return None


def _read(over: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """(path, value, shape), from the outside in: what is checked first may be relied on by what follows."""
    yield "serviceAccount", over.get("serviceAccount"), _TEXT
    yield "priorityClassName", over.get("priorityClassName"), _TEXT
    for volume in over.get("volumes") or ():
        path = f"volumes[{volume['name']}].projected"
        yield path, volume.get("projected"), _OBJECT
        yield f"{path}.sources", (volume.get("projected") or {}).get("sources"), _LIST
    for kind in ("containers", "initContainers"):
        yield kind, over.get(kind), _LIST
        for number, container in enumerate(over.get(kind) or ()):
            path = f"{kind}[{container.get('name', number)}]"
            yield f"{path}.securityContext", container.get("securityContext"), _OBJECT
            yield f"{path}.ports", container.get("ports"), _LIST
            yield f"{path}.volumeMounts", container.get("volumeMounts"), _LIST


def _is(value: Any, wanted: str) -> bool:
    if wanted == _LIST:
        return isinstance(value, list) and all(isinstance(item, Mapping) for item in value)
    return isinstance(value, str if wanted == _TEXT else Mapping)
