"""Keep which value each tensor is while a model is recorded: operations that return what they are given rename it."""

from __future__ import annotations

from collections.abc import Collection

from everstep.pipeline.frontend.refs import Ref, ValueRef


class Renames:
    """The values that tensors became, in order, so that they can be what they were before.

    Args:
        refs: The reference of each tensor, by its id. It is changed in place.
    """

    def __init__(self, refs: dict[int, Ref]) -> None:
        self._refs = refs
        self._found: list[tuple[int, Ref | None, bool]] = []

    def __len__(self) -> int:
        """Return the number of values so far."""
        return len(self._found)

    def add(self, tensor: int, ref: ValueRef, *, is_changed: bool) -> None:
        """Note that a tensor is another value from now on.

        Args:
            tensor: Its id.
            ref: The value.
            is_changed: Whether its memory was written, and not only the same tensor returned.
        """
        self._found.append((tensor, self._refs.get(tensor), is_changed))
        self._refs[tensor] = ref

    def find_unchanged(self) -> dict[int, Ref]:
        """Return by the number of a value what its tensor was before, where an operation only returned it."""
        return {
            number: ref for number, (_, ref, is_changed) in enumerate(self._found) if ref is not None and not is_changed
        }

    def undo(self, count: int) -> None:
        """Forget all values but the first ones: their makers are not recorded. What was another before is it again."""
        while len(self._found) > count:
            tensor, ref, _ = self._found.pop()
            if ref is None:
                del self._refs[tensor]
            else:
                self._refs[tensor] = ref

    def leave(self, count: int, returned: Collection[Ref]) -> None:
        """End a call: what it was given and has not changed is for the code around what it was before.

        In `x = x.contiguous()` the name is the call's own, and the code around has its `x` from elsewhere. Otherwise
        the call would share a tensor beside its results with all who use `x` after it.

        Args:
            count: The number of values when the call began.
            returned: The references in what the call returns.
        """
        kept: set[int] = set()
        for tensor, ref, is_changed in reversed(self._found[count:]):
            if is_changed or self._refs[tensor] in returned:
                kept.add(tensor)
            if ref is not None and tensor not in kept:
                self._refs[tensor] = ref
