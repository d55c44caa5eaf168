"""Calls of modules that depend on data, which run as they are: all that leaves them is as the trace saw it, or refused.

The code around such a module was traced with what it gave on random numbers. What it gives, changes and sets for the
data of a step may be something else, of which other stages would see nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from everstep.pipeline.errors import PipelineError
from everstep.pipeline.frontend.attributes import FixedAttributes
from everstep.pipeline.frontend.batch_statistics import STATISTICS, are_statistics_put_together
from everstep.pipeline.frontend.record import Call, ForwardRecord, iterate_parts
from everstep.pipeline.frontend.refs import Frame, ValueRef, iterate_references

_ADVICE = "this depends on data, and code in other stages would not see it: let it return what it makes"


class UnseenCall:
    """One call of a module that depends on data, or has such modules in it.

    Args:
        record: Of the model.
        call: The call.
        put: Puts the tensors of its result into a frame.
        fixed: The attributes that code reads which a cut may open, as they were.
    """

    def __init__(
        self, record: ForwardRecord, call: Call, put: Callable[[Any, Frame], None], fixed: FixedAttributes
    ) -> None:
        self._name, self._module, self._changes = call.name, call.module, call.changes
        self._put, self._fixed = put, fixed
        self._opaque = [each for each in call.all_calls() if each.opaque]
        self._is_changed_later = _is_changed_by_others(record, call)
        self.refuses_writes = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module.

        Raises:
            PipelineError: It has changed a tensor that it has not changed before, or a list or a dictionary; or it
                returns memory that it was given, and that others change.
        """
        leaves, spec = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        versions, held = list(map(_get_version, tensors)), self._list_held() if self.refuses_writes else []
        result = self._module(*args, **kwargs)
        now, form = pytree.tree_flatten((args, kwargs))
        what = "" if form == spec and all(map(is_, now, leaves)) else "a list or a dictionary"
        for place, (tensor, version) in enumerate(zip(tensors, versions, strict=True)):
            if place not in self._changes and _get_version(tensor) != version:
                what = "a tensor"
        if what:
            raise PipelineError(
                f"module {self._name!r} has changed {what} that it was given, and did not when pipeline() was called: "
                f"{_ADVICE}"
            )
        for path, name, tensor, version in held:
            if _get_version(tensor) != version:
                raise _make_write_error(path, name)
        if self._is_changed_later and _share_memory(tensors, result):
            raise PipelineError(
                f"module {self._name!r} has returned memory that it was given, which code around it changes in place: "
                "in one process what it was given changes too, also in other stages: let it return a copy (clone())"
            )
        return result

    def put(self, result: Any, frame: Frame) -> None:
        """Put the tensors of a result into a frame.

        Raises:
            PipelineError: The module has set an attribute that code around it reads, or one is of another kind than
                this code was traced with.
        """
        self._fixed.check()
        self._put(result, frame)

    def _list_held(self) -> list[tuple[str, str, torch.Tensor, int]]:
        return [
            (call.path, name, tensor, _get_version(tensor))
            for call in self._opaque
            for name, tensor in (*call.module.named_parameters(), *call.module.named_buffers())
            if name not in call.writes
        ]


class LateWrites:
    """Buffers that a stage writes, or puts others in the place of, though its forward did not in the trace: for some
    sizes, or by an attribute of a module that runs as it is. Those that are not there yet, or None, are tables that
    forward makes for itself, as in an attribute.

    Args:
        module: Of the stage.
    """

    def __init__(self, module: nn.Module) -> None:
        # Statistics that a pipeline puts together are written in each micro-batch.
        written = {path: STATISTICS for path, part in module.named_modules() if are_statistics_put_together(part)}
        self._parts = list[tuple[str, dict[str, Any], list[str]]]()
        for path, part in module.named_modules():
            there = [name for name, each in part._buffers.items() if each is not None]
            if names := [name for name in there if name not in written.get(path, ())]:
                self._parts.append((path, part._buffers, names))

    def look(self) -> dict[tuple[str, str], tuple[Any, int]]:
        """Return the buffers and their versions, by the paths of modules and their names."""
        return {
            (path, name): (buffers[name], _get_version(buffers[name]) if buffers[name] is not None else 0)
            for path, buffers, names in self._parts
            for name in names
            if name in buffers
        }

    def check(self, before: dict[tuple[str, str], tuple[Any, int]]) -> None:
        """Compare the buffers with what they were before.

        Raises:
            PipelineError: One has been written.
        """
        for place, (tensor, version) in self.look().items():
            held, known = before.get(place, (None, 0))
            if tensor is held and version == known:
                continue
            if tensor is held or not _are_equal(tensor, held):  # one that is registered again each time is the same
                raise _make_write_error(*place)


def _are_equal(one: Any, other: Any) -> bool:
    if one is None or other is None or (one.shape, one.dtype, one.device) != (other.shape, other.dtype, other.device):
        return one is other
    return bool(torch.equal(one, other))


def _make_write_error(path: str, name: str) -> PipelineError:
    return PipelineError(
        f"module {path!r} has written its {name!r}, and did not when pipeline() was called: this depends on data, on "
        "sizes or on an attribute, and a pipeline calls it for each micro-batch, and one process once for the whole "
        "batch: write it in the script, after optimizer.step(), or take microbatches=1 and one replica; "
        "PlanOptions(check=False) trains it as it is"
    )


def refuse_late_writes(functions: Iterable[Any]) -> None:
    """Let modules among these that depend on data write no weight or buffer that they did not write in the trace."""
    for each in functions:
        if isinstance(each, UnseenCall):
            each.refuses_writes = True


def _is_changed_by_others(record: ForwardRecord, call: Call) -> bool:
    """Tell whether others change memory that a call is given or gives, while what it is given is used elsewhere too."""
    own = set(iterate_parts(call))
    touches = {memory for part in own for memory in part.touches}
    given = {ref for ref in iterate_references(call.inputs) if isinstance(ref, ValueRef)}
    others = [part for part in iterate_parts(record.root) if part not in own]
    return any(part.mutates & touches for part in others) and any(
        not given.isdisjoint(iterate_references(part.inputs)) for part in others
    )


def _share_memory(given: Collection[torch.Tensor], result: Any) -> bool:
    made = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    known = {each.untyped_storage().data_ptr() for each in given if each.layout is torch.strided} - {0}
    return any(each.layout is torch.strided and each.untyped_storage().data_ptr() in known for each in made)


def _get_version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else int(tensor._version)
