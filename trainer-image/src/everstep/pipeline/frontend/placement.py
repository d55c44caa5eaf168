"""Place modules in the stages that the user names: by `with pipeline.stage(1):`, and by prefixes of names."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from everstep.pipeline.errors import PipelineError
from everstep.pipeline.graph import Graph

_now = threading.local()
_built: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def stage(index: int) -> Iterator[None]:
    """Place what is built inside, or called inside while a model is traced, in this stage; the innermost context
    counts.

    Around construction it holds for the modules whose `__init__` begins inside, in `forward` for every call inside.

    Args:
        index: The stage, counted from 0.

    Raises:
        PipelineError: The index is negative.
    """
    from torch import nn

    if index < 0:
        raise PipelineError(f"stage {index}: stages are numbered from 0")
    before, original = get_current_stage(), nn.Module.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        # Patched for all threads, meant for this one; an inner context has been here already.
        if (here := get_current_stage()) is not None and self not in _built:
            _built[self] = here

    nn.Module.__init__ = init
    _now.stage = index
    try:
        yield
    finally:
        _now.stage = before
        nn.Module.__init__ = original


def get_current_stage() -> int | None:
    """The stage of the context around, None outside of all."""
    return getattr(_now, "stage", None)


def built_in(module: Any) -> int | None:
    """The stage in whose context a module was built."""
    return _built.get(module)


def place(module: Any, index: int) -> None:
    """`module` and all in it are in stage `index`, wherever they were built."""
    for each in module.modules():
        _built[each] = index


def is_inside(name: str, prefix: str) -> bool:
    """Tell whether a node is that module, one of its calls, or inside it: `h.1` has `h.1.mlp` and `h.1:add`, not
    `h.10`."""
    return name.startswith(prefix) and (not prefix or name[len(prefix) : len(prefix) + 1] in ("", ".", ":", "@", "["))


def complete_placement(graph: Graph, stage_of: Mapping[str, int]) -> dict[str, int]:
    """The stage of every node. `stage_of` names nodes or modules, the longest name counts; what it leaves out is where
    the values it uses are, in stage 0 if it uses none.

    PipelineError if a name is no node's, if a value would flow to a lower stage, if a stage is empty.
    """
    chosen = _resolve_placement(graph, stage_of)
    groups: dict[str, list[str]] = {}
    for node in graph.nodes:
        if node.colocate:
            groups.setdefault(node.colocate, []).append(node.name)
    found = {node.name: chosen.get(node.name, 0) for node in graph.nodes}
    changed = True
    while changed:  # a group of nodes may lift one that stood before it
        changed = False
        for node in graph.nodes:
            together = groups.get(node.colocate, [node.name])
            lowest = max([found[name] for name in (*node.inputs, *together)])
            for name in together:
                if found[name] < lowest:
                    found[name], changed = lowest, True
    for name, wanted in chosen.items():
        if found[name] != wanted and not _is_later_call(name, stage_of):
            raise PipelineError(
                f"{name!r} cannot be in stage {wanted}: it uses values of stage {found[name]}, or must be where "
                "something of that stage is; values flow to higher stages only"
            )
    empty = set(range(max(found.values()) + 1)) - set(found.values())
    if empty:
        raise PipelineError(f"stages {sorted(empty)} would be empty: {_list_known_names(graph)}")
    return found


def _resolve_placement(graph: Graph, stage_of: Mapping[str, int]) -> dict[str, int]:
    chosen: dict[str, int] = {}
    unknown = set(stage_of)
    prefixes = sorted(stage_of, key=len, reverse=True)
    for node in graph.nodes:
        exact = [node.name] if node.name in stage_of else []
        for prefix in exact or [prefix for prefix in prefixes if is_inside(node.name, prefix)]:
            unknown.discard(prefix)
            chosen.setdefault(node.name, stage_of[prefix])
    unknown = {name for name in unknown if not any(is_inside(node.name, name) for node in graph.nodes)}
    if unknown:
        raise PipelineError(f"no node is called {', '.join(map(repr, sorted(unknown)))}: {_list_known_names(graph)}")
    return chosen


def _is_later_call(name: str, stage_of: Mapping[str, int]) -> bool:
    """Tell whether a node is a later call of a module inside one that has a stage, as a dropout that several blocks
    share: another module calls it, which may be in a higher stage."""
    if name in stage_of:
        return False
    prefix = max((each for each in stage_of if is_inside(name, each)), key=len)
    return "@" in name[len(prefix) + 1 :]


def _list_known_names(graph: Graph) -> str:
    names: Sequence[str] = [node.name for node in graph.nodes]
    return "the nodes are " + ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")
