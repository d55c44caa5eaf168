"""Random numbers that depend on neither the number of stages nor on recomputation.

Each module call draws from a generator that is seeded by f(seed, step, micro-batch, module name, which call of it), and
gives the generator back as it was. So a module draws the same wherever, and however often, it runs. What a module's own
code draws beside its submodules belongs to it; such a module must not be cut, and the front end does not.

Seeding costs some 10 µs a call. Modules of torch that never draw are left out from the start, others when the first
step has shown that they do not; should one begin to draw later, all are back.
"""

from __future__ import annotations

import contextlib
import hashlib
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

NOTHING: Mapping[str, Sequence[int]] = {}
_DRAWING = ("Dropout", "RReLU", "MultiheadAttention", "Transformer", "RNN", "LSTM", "GRU", "FractionalMaxPool")


def seed_of(seed: int, step: int, microbatch: int, name: str, call: int = 0) -> int:
    """64 bits from everything that a draw depends on."""
    text = f"{seed}/{step}/{microbatch}/{call}/{name}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


class Random:
    """Holds the generators of this rank for its modules; `modules`: by their names in the whole model."""

    def __init__(self, modules: Mapping[str, nn.Module], device: torch.device, seed: int) -> None:
        self.seed, self.step, self.microbatch = seed, 0, 0
        self._names: dict[nn.Module, str] = {}
        self._calls: Counter[str] = Counter()
        self._repeats = NOTHING
        self._drew: set[str] = set()
        self._inside = False
        self._asleep = False  # whether modules that have not drawn are left out
        self._outer: list[tuple[nn.Module, Any, Any]] = []  # of each call under way: the state around it, its own first
        self._generator: Any = torch.cuda.default_generators[device.index or 0] if device.type == "cuda" else None
        self._generator = self._generator or torch.default_generator
        self._hooks: list[Any] = []
        for name, module in modules.items():
            if module not in self._names and _may_draw(module):
                self._names[module] = name
                self._hooks.append(module.register_forward_pre_hook(self._enter))
                self._hooks.append(module.register_forward_hook(self._leave))

    @contextlib.contextmanager
    def of(self, microbatch: int, repeats: Mapping[str, Sequence[int]] = NOTHING) -> Iterator[None]:
        """Module calls inside belong to this micro-batch of all replicas and accumulated batches of the step.

        `repeats`: of modules that other stages call too, which of all their calls those inside are.
        """
        self.microbatch, self._inside, self._repeats = microbatch, True, repeats
        self._calls.clear()
        before = self._generator.get_state()
        try:
            yield
        finally:
            self._inside = False
            if self._outer:  # a call was left by an exception
                self._generator.set_state(self._outer[0][1])
                self._outer.clear()
        if self._asleep and not torch.equal(before, self._generator.get_state()):
            self._asleep = False
            warnings.warn(
                "a module that drew no random numbers in the first step has begun to: those of this micro-batch depend "
                "on how the model is cut",
                stacklevel=2,
            )

    def close(self) -> None:
        """Leaves the modules as if it had never been."""
        for hook in self._hooks:
            hook.remove()

    def next_step(self) -> None:
        """The numbers of the next step."""
        self.step += 1
        self._asleep = True

    def _enter(self, module: nn.Module, _: Any) -> None:
        if not self._inside or not module.training:
            return
        name = self._names[module]
        if self._asleep and name not in self._drew:
            return
        outer = self._generator.get_state()
        call = self._calls[name]
        call = self._repeats[name][call] if name in self._repeats else call
        self._generator.manual_seed(seed_of(self.seed, self.step, self.microbatch, name, call))
        self._calls[name] += 1
        self._outer.append((module, outer, None if name in self._drew else self._generator.get_state()))

    def _leave(self, module: nn.Module, *_: Any) -> None:
        if not self._outer or self._outer[-1][0] is not module:
            return
        _, outer, fresh = self._outer.pop()
        if fresh is not None and not torch.equal(fresh, self._generator.get_state()):
            self._drew.add(self._names[module])
        self._generator.set_state(outer)


def _may_draw(module: nn.Module) -> bool:
    kind = type(module)
    if not kind.__module__.startswith("torch.nn.modules"):
        return True
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return bool(module.p)
    return any(word in kind.__name__ for word in _DRAWING)
