"""Everything that is neither a module nor an optimizer: objects with a state_dict, tensors, plain nested values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from everstep.checkpoint.state import names
from everstep.checkpoint.state.kinds import Saved, Stateful, Stepped, detached, fresh, is_tensor, misfit


class StatefulObject:
    """An object with state_dict and load_state_dict: a scheduler, a scaler, a sampler."""

    exclusive = False  # its state may have other names in the next step, so what is saved decides

    def __init__(self, prefix: str, inner: Stateful, step: int | None) -> None:
        self.prefix = prefix
        self._inner = inner
        self._step = step

    def leaves(self) -> Iterator[tuple[str, Any]]:
        if self._step is not None and isinstance(self._inner, Stepped):
            yield from _leaves(self.prefix, self._inner.state_at(self._step))
        else:
            yield from _leaves(self.prefix, self._inner.state_dict())

    def targets(self, saved: Saved, problems: list[str]) -> dict[str, torch.Tensor]:
        return _targets(saved, self._inner.state_dict() if saved.tensors else {}, problems)

    def load(self, saved: Saved, tensors: Mapping[str, torch.Tensor]) -> None:
        self._inner.load_state_dict(saved.nested(tensors))


class Value:
    """A tensor, or a nested value: a dictionary and a list get their content back in place."""

    exclusive = False

    def __init__(self, prefix: str, value: Any) -> None:
        self.prefix = prefix
        self.value = value

    def leaves(self) -> Iterator[tuple[str, Any]]:
        yield from _leaves(self.prefix, self.value)

    def targets(self, saved: Saved, problems: list[str]) -> dict[str, torch.Tensor]:
        if is_tensor(self.value) and "" not in saved.tensors:
            problems.append(f"{self.prefix} is no tensor in the checkpoint")
            return {}
        return _targets(saved, self.value, problems, whole=is_tensor(self.value))

    def load(self, saved: Saved, tensors: Mapping[str, torch.Tensor]) -> None:
        loaded = saved.nested(tensors)
        if isinstance(self.value, dict) and isinstance(loaded, dict):
            self.value.clear()
            self.value.update(loaded)
        elif isinstance(self.value, list) and isinstance(loaded, list):
            self.value[:] = loaded
        else:
            self.value = loaded


def _leaves(prefix: str, state: Any) -> Iterator[tuple[str, Any]]:
    for name, leaf in names.walk(state, is_tensor, prefix):
        yield name, detached(leaf)


def _targets(saved: Saved, state: Any, problems: list[str], *, whole: bool = False) -> dict[str, torch.Tensor]:
    """Tensors like those that the object holds now, sharded as they are; new ones for names that it does not hold.

    `whole`: the object is a tensor, so the bytes go into it and must fit.
    """
    held = {name: leaf for name, leaf in names.walk(state, is_tensor) if is_tensor(leaf)}
    found: dict[str, torch.Tensor] = {}
    for name, tensor in saved.tensors.items():
        mine = held.get(name)
        if mine is None:
            found[saved.full(name)] = fresh(tensor)
        elif whole:
            if why := misfit(tensor, mine, saved.casts):
                problems.append(f"{saved.full(name)} {why}")
            found[saved.full(name)] = mine.detach()
        elif misfit(tensor, mine, saved.casts):
            # An object may hold tensors that grow; but what is sharded can only come back as it was.
            if hasattr(mine, "placements"):
                problems.append(f"{saved.full(name)} {misfit(tensor, mine)}")
            new = fresh(tensor)
            found[saved.full(name)] = new if mine.is_cpu else torch.empty_like(new, device=mine.device)
        else:
            found[saved.full(name)] = torch.empty_like(mine)
    return found
