"""Merge the records of training and evaluation: what differs only in a number is chosen when it runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils import _pytree as pytree

from everstep.pipeline.frontend.attributes import are_arrays_equal, is_array
from everstep.pipeline.frontend.record import Call, ForwardRecord, Op, iterate_made_values, iterate_parts
from everstep.pipeline.frontend.refs import (
    Argument,
    Constant,
    Ref,
    Size,
    Slice,
    Template,
    ValueRef,
    Weight,
    are_plain_leaves_equal,
    is_reference,
    iterate_references,
    list_plain_leaves,
)

_NOTHING: Mapping[int, Ref] = {}
DIFFERS = "it does something else in evaluation than in training"


class _Differ(Exception):
    """Two calls do not match."""


def merge_records(one: ForwardRecord, other: ForwardRecord) -> bool:
    """Give the operations of `one` the inputs that they have in `other`, recorded with all training flags the other
    way. Calls that differ in more are never cut; False if the model itself does."""
    try:
        _Merge(one.constants, other.constants, _find_returned(other)).call(one.root, other.root)
    except _Differ:
        return False
    return True


def _find_returned(record: ForwardRecord) -> dict[int, Ref]:
    """Return the values that are the very tensors that operations were given, as those of dropout in evaluation, and
    what these were, unless they are changed later."""
    found, changed = dict[int, Ref](), set[int]()
    for part in reversed(list(iterate_parts(record.root))):
        if changed.isdisjoint(part.touches):
            returned = record.unchanged.keys() & set(iterate_made_values(part))
            found |= {index: record.unchanged[index] for index in returned}
        changed |= part.mutates
    for index in sorted(found):
        before = found[index]
        if isinstance(before, ValueRef):
            found[index] = found.get(before.index, before)
    return found


def are_records_equal(one: ForwardRecord, other: ForwardRecord) -> bool:
    """Return whether two records of the same mode do the same. Else `one` is of no use afterwards."""
    try:
        _Merge(one.constants, other.constants).call(one.root, other.root)
    except _Differ:
        return False
    calls = list(one.root.all_calls())
    items: list[Op | Call] = [*calls, *one.root.ops()]
    return all(item.other is None for item in items) and all(
        call.whole != DIFFERS and call.other_outputs is None for call in calls
    )


def do_the_same(one: ForwardRecord, other: ForwardRecord, *, with_inputs: bool = True) -> bool:
    """Return whether two records of the same mode differ in nothing but calls that have no others inside, which run as
    they are; `with_inputs`, also in what the model is given. `one` is of no use afterwards."""
    if not with_inputs:
        one.root.inputs = other.root.inputs = None
    try:
        _Merge(one.constants, other.constants).call(one.root, other.root)
    except _Differ:
        return False
    if _list_numbers(one) != _list_numbers(other):
        return False

    def same(call: Call) -> bool:
        if not any(call.calls()) and call.path:
            is_known = call.inputs is not None and call.outputs is not None
            return is_known and call.other is None and call.other_outputs is None
        return (
            call.other is None
            and call.whole != DIFFERS
            and all(same(item) if isinstance(item, Call) else item.other is None for item in call.body)
        )

    return same(one.root)


def _list_numbers(record: ForwardRecord) -> list[int | None]:
    """Return what the sizes have become that operations and calls are given which stages run one by one: the numbers
    that they were found to be, or None."""
    found, waiting = list[int | None](), [record.root]
    while waiting:
        call = waiting.pop()
        waiting += call.calls()
        inside = call.body if not call.path or any(call.calls()) else []
        for template in (call.inputs, call.outputs, *(each.inputs for each in inside if isinstance(each, Op))):
            for ref in iterate_references(template):
                if isinstance(ref, Size):
                    size = record.sizes.simplify(ref.expr)
                    found.append(size if isinstance(size, int) else None)
    return found


class _Merge:
    def __init__(self, constants: list[Any], others: list[Any], returned: Mapping[int, Ref] = _NOTHING) -> None:
        place = {id(tensor): index for index, tensor in enumerate(constants)}
        self.constants = {index: place.get(id(tensor)) for index, tensor in enumerate(others)}
        self.returned = returned  # of `other`
        # Of `other` to those of `one`: several, where a module or dropout hands on what it is given in one mode only.
        self.values: dict[Ref, frozenset[int]] = {}
        self.known: dict[int, Ref] = {}  # the other way: never several

    def call(self, one: Call, other: Call) -> None:
        """_Differ if even what goes in and out is not the same."""
        kept = dict(self.values), dict(self.known)
        try:
            self.body(one, other)
        except _Differ:
            if not one.path or one.outputs is None or other.outputs is None:
                raise
            one.whole = one.whole or DIFFERS
            self.values, self.known = kept
        if one.inputs is not None and other.inputs is not None:
            one.other = self.inputs(one.inputs, other.inputs)
        if one.outputs is not None and other.outputs is not None:
            self.outputs(one.outputs, other.outputs)
            if not are_plain_leaves_equal(list_plain_leaves(one.outputs), list_plain_leaves(other.outputs)):
                one.other_outputs = other.outputs

    def body(self, one: Call, other: Call) -> None:
        if len(one.body) != len(other.body) or bool(one.opaque) != bool(other.opaque):
            raise _Differ
        for a, b in zip(one.body, other.body, strict=True):
            if isinstance(a, Call) and isinstance(b, Call) and a.path == b.path:
                self.call(a, b)
            elif isinstance(a, Op) and isinstance(b, Op) and a.name == b.name:
                a.other = self.inputs(a.inputs, b.inputs)
                a.draws, a.seeded = a.draws or b.draws, a.seeded or b.seeded
                self.outputs(a.outputs, b.outputs)
            else:
                raise _Differ

    def inputs(self, one: Template, other: Template) -> Template:
        """`other` in the words of `one`; None if they are equal."""
        (a, spec), (b, other_spec) = pytree.tree_flatten(one), pytree.tree_flatten(other)
        if spec != other_spec:
            raise _Differ
        found = [self.translate(leaf, like) for leaf, like in zip(b, a, strict=True)]
        for left, right in zip(a, found, strict=True):
            if left is not right and (is_reference(left) or is_reference(right)) and left != right:
                raise _Differ
        same = all(left is right or _are_items_equal(left, right) for left, right in zip(a, found, strict=True))
        return None if same else pytree.tree_unflatten(found, spec)

    def outputs(self, one: Template, other: Template) -> None:
        (a, spec), (b, other_spec) = pytree.tree_flatten(one), pytree.tree_flatten(other)
        if spec != other_spec:
            raise _Differ
        for left, right in zip(a, b, strict=True):
            original = self.find_original(right)
            if isinstance(left, ValueRef) and isinstance(right, ValueRef | Argument):
                if self.known.setdefault(left.index, original) != original:
                    raise _Differ
                self.values[original] = self.values.get(original, frozenset()) | {left.index}
            elif is_reference(left) != is_reference(right) or (is_reference(left) and left != original):
                raise _Differ

    def find_original(self, ref: Any) -> Any:
        """Return the reference of a tensor of `other` before operations have returned it as it was."""
        return self.returned.get(ref.index, ref) if isinstance(ref, ValueRef) else ref

    def translate(self, leaf: Any, like: Any) -> Any:
        """A leaf of `other` in the words of `one`, where `like` is in its place."""
        leaf = self.find_original(leaf)
        if isinstance(leaf, ValueRef | Argument | Weight):
            names = self.values.get(leaf, frozenset())
            if isinstance(like, ValueRef) and like.index in names:
                return like
            if not isinstance(leaf, ValueRef):
                return leaf
            if not names:
                raise _Differ
            return ValueRef(min(names))
        if isinstance(leaf, Constant):
            index = self.constants[leaf.index]
            if index is None:
                raise _Differ
            return Constant(index)
        if isinstance(leaf, Slice):
            parts = like if isinstance(like, Slice) else leaf
            return Slice(
                self.translate(leaf.start, parts.start),
                self.translate(leaf.stop, parts.stop),
                self.translate(leaf.step, parts.step),
            )
        return leaf


def _are_items_equal(one: Any, other: Any) -> bool:
    if is_array(one) and is_array(other):  # made anew in each forward
        return are_arrays_equal(one, other)
    return type(one) is type(other) and bool(one == other)
