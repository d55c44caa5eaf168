"""Random numbers that depend on neither the number of stages nor on recomputation.

Each module call draws from generators that are seeded by f(seed, step, micro-batch, module name, which call of it), and
leaves them with a seed that the code around it goes on with. So a module draws the same wherever, and however often, it
runs. What a module's own code draws beside its submodules belongs to it; such a module must not be cut, and the front
end does not.

A module that is compiled draws as one, and so must what is inside it: by the same compiled code wherever the model is
cut, but not as the same modules do uncompiled.

A call that draws nothing leaves no trace: the code around it goes on as if it had not been. So it makes no difference
whether such modules are left out, and a run that is resumed draws what it would have drawn uninterrupted.

Seeding costs some 10 µs a call. Modules of torch that never draw are left out from the start, others when the first
step has shown that they do not; should one begin to draw later, all are back.
"""

from __future__ import annotations

import contextlib
import hashlib
import warnings
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from everstep.pipeline.engine.generators import LinkedGenerators, generators_of
from everstep.pipeline.frontend.compiled import is_compiled

NOTHING: Mapping[str, Sequence[int]] = {}
_DRAWING = ("Dropout", "RReLU", "MultiheadAttention", "Transformer", "RNN", "LSTM", "GRU", "FractionalMaxPool")


def seed_of(seed: int, step: int, microbatch: int, name: str, call: int = 0) -> int:
    """64 bits from everything that a draw depends on."""
    text = f"{seed}/{step}/{microbatch}/{call}/{name}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


@dataclass
class _Log:
    """The log of the calls of one forward.

    Each entry and each end of a call is an event, after which the generator begins with a seed of its own. Code that
    restores an earlier state, such as an activation checkpoint, thereby shows which calls are repeated.
    """

    entered: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))  # of each name, the events
    calls: dict[str, int] = field(default_factory=lambda: defaultdict(int))  # of each name, all of them
    begun: dict[int, int] = field(default_factory=dict)  # the seed that the call begins with that was entered so
    seeds: dict[int, int] = field(default_factory=dict)  # of events
    left: dict[int, int] = field(default_factory=dict)  # the seed at the end of the call that was entered so
    events: int = 0

    def next(self, seed: int) -> int:
        self.events += 1
        self.seeds[seed % 2**64] = self.events
        return self.events


@dataclass
class _Frame:
    """A call under way: the seed and the state around it, its own seed, its event, and whether a call in it drew.

    The state is None if the call is known to draw.
    """

    module: nn.Module
    around: int
    before: Any
    seed: int
    event: int
    drew: bool = False


class Random:
    """Holds the generators of this rank, the device's and the processor's, for its modules; `modules`: by their names
    in the whole model."""

    def __init__(self, modules: Mapping[str, nn.Module], device: torch.device, seed: int) -> None:
        self.seed, self.step, self.microbatch = seed, 0, 0
        self._names: dict[nn.Module, str] = {}
        self._repeats = NOTHING
        self._drew: set[str] = set()
        self._inside = self._again = False
        self._asleep = False  # whether modules that have not drawn are left out
        self._logs: dict[tuple[int, int], _Log] = {}
        self._log = _Log()
        self._frames: list[_Frame] = []
        self.drew_in_evaluation = False  # on this rank, in that under way
        self._quiet = 0  # the seed after the last call that is in no other
        # Modules on a device may draw on the processor too, as for the depth of a network or a mask.
        self._generator = LinkedGenerators(generators_of(device))
        self._hooks: list[Any] = []
        self._compiled: list[tuple[nn.Module, Any]] = []  # with what they were called by
        whole = [f"{name}." for name, module in modules.items() if is_compiled(module)]
        for name, module in modules.items():
            # Hooks inside of what is compiled would only have it compiled anew.
            if module not in self._names and _may_draw(module) and not name.startswith(tuple(whole)):
                self._names[module] = name
                if module._compiled_call_impl is not None:  # its hooks would be compiled too
                    self._compiled.append((module, module._compiled_call_impl))
                    module._compiled_call_impl = partial(self._call, module, module._compiled_call_impl)
                else:
                    self._hooks.append(module.register_forward_pre_hook(self._enter))
                    self._hooks.append(module.register_forward_hook(self._leave))

    @contextlib.contextmanager
    def of(self, microbatch: int, repeats: Mapping[str, Sequence[int]] = NOTHING, stage: int = 0) -> Iterator[None]:
        """Module calls inside belong to this micro-batch of all replicas and accumulated batches of the step.

        `repeats`: of modules that other stages call too, which of all their calls those inside are.
        """
        log = self._logs[stage, microbatch] = _Log()
        seed = seed_of(self.seed, self.step, microbatch, f"/{stage}")
        with self._calls(microbatch, repeats, log, again=False):
            self._generator.manual_seed(seed)
            log.next(seed)
            self._quiet = seed
            yield
            drew = self._asleep and self._has_drawn_since(self._quiet)
        if drew:
            self._asleep = False
            warnings.warn(
                f"a module of stage {stage} draws random numbers, and drew none in the first step: those of "
                f"micro-batch {microbatch} depend on how the model is cut; let it draw from the first step on",
                stacklevel=2,
            )

    @contextlib.contextmanager
    def again(self, microbatch: int, repeats: Mapping[str, Sequence[int]] = NOTHING, stage: int = 0) -> Iterator[None]:
        """Around a backward: what it does once more of the forward, as activation checkpoints do, draws the same."""
        with self._calls(microbatch, repeats, self._logs.get((stage, microbatch), _Log()), again=True):
            yield

    @contextlib.contextmanager
    def of_evaluation(
        self, microbatch: int, repeats: Mapping[str, Sequence[int]] = NOTHING, stage: int = 0
    ) -> Iterator[None]:
        """Draw inside what follows from where the default generator stands, which afterwards stands there again.

        Only the ranks whose stages draw would move theirs, and then shuffle the data in another order than the others.
        `repeats` is taken as by `of`, and not needed: numbers of an evaluation depend on the cut.
        """
        before = self._generator.get_state()
        try:
            seed = seed_of(self._generator.draw(), 0, microbatch, f"/evaluation of {stage}")
            self._generator.manual_seed(seed)
            yield
            self.drew_in_evaluation = self.drew_in_evaluation or self._has_drawn_since(seed)
        finally:
            self._generator.set_state(before)

    def end_evaluation(self, *, drew: bool) -> None:
        """Move the generators as those of all ranks, if any rank `drew`: the next evaluation then draws others."""
        self.drew_in_evaluation = False
        if drew:
            self._generator.draw()

    @contextlib.contextmanager
    def of_hooks(self, name: str) -> Iterator[None]:
        """Draw inside what all copies of the parameter of this name draw in this step."""
        before = self._generator.get_state()
        try:
            self._generator.manual_seed(seed_of(self.seed, self.step, 0, f"/hooks of {name}"))
            yield
        finally:
            self._generator.set_state(before)

    def close(self) -> None:
        """Leave the modules as if this object had never been."""
        for hook in self._hooks:
            hook.remove()
        for module, call in self._compiled:
            module._compiled_call_impl = call

    def next_step(self) -> None:
        """The numbers of the next step."""
        self.step += 1
        self._asleep = True
        self._logs.clear()

    @contextlib.contextmanager
    def _calls(
        self, microbatch: int, repeats: Mapping[str, Sequence[int]], log: _Log, *, again: bool
    ) -> Iterator[None]:
        around = self.microbatch, self._repeats, self._log, self._inside, self._again, self._frames
        self.microbatch, self._repeats, self._log = microbatch, repeats, log
        self._inside, self._again, self._frames = True, again, []
        before = self._generator.get_state()
        try:
            yield
        finally:
            self._generator.set_state(before)
            self.microbatch, self._repeats, self._log, self._inside, self._again, self._frames = around

    def _call(self, module: nn.Module, call: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # a part of what is compiled around it
            return call(*args, **kwargs)
        self._enter(module, args)
        result = call(*args, **kwargs)
        self._leave(module)
        return result

    def _enter(self, module: nn.Module, _: Any) -> None:
        if torch.compiler.is_compiling():  # what is compiled draws as one, from the seed of the whole
            return
        if not self._inside or not module.training:
            return
        name = self._names[module]
        if (name not in self._log.entered) if self._again else (self._asleep and name not in self._drew):
            return
        entered, around = self._log.entered[name], self._generator.initial_seed()
        if self._again:
            call = bisect_right(entered, self._log.seeds.get(around, 0))
            if call == len(entered):
                return
            event = entered[call]
            seed = self._log.begun[event]
        else:
            call = self._log.calls[name]
            self._log.calls[name] += 1
            number = self._repeats[name][call] if name in self._repeats else call
            seed = seed_of(self.seed, self.step, self.microbatch, name, number)
            event = self._log.next(seed)
            entered.append(event)
            self._log.begun[event] = seed
        # A state is 5 kB, and comparing two of them takes as long as all else here.
        before = None if name in self._drew and _always_draws(module) else self._generator.get_state()
        self._generator.manual_seed(seed)
        self._frames.append(_Frame(module, around, before, seed, event))

    def _leave(self, module: nn.Module, *_: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if not self._frames or self._frames[-1].module is not module:
            return
        frame, name = self._frames.pop(), self._names[module]
        if frame.before is not None and not frame.drew and not self._has_drawn_since(frame.seed):
            self._generator.set_state(frame.before)
            if not self._again:
                self._log.entered[name].remove(frame.event)  # when it is repeated, it is not looked for
            return
        self._drew.add(name)
        if self._frames:
            self._frames[-1].drew = True
        if frame.event not in self._log.left:
            seed = self._log.left[frame.event] = seed_of(frame.around, 0, 0, "/left")
            self._log.next(seed)
        self._generator.manual_seed(self._log.left[frame.event])
        if not self._frames:
            self._quiet = self._log.left[frame.event]

    def _has_drawn_since(self, seed: int) -> bool:
        """Tell whether any code has drawn since the generator was given this seed; then seed it anew."""
        now = self._generator.get_state()
        self._generator.manual_seed(seed)
        return not self._generator.stands_at(now)


def _always_draws(module: nn.Module) -> bool:
    """Tell whether each call of a module that has drawn once draws; code of users may decide it anew each time."""
    return type(module).__module__.startswith("torch.nn.modules")


def _may_draw(module: nn.Module) -> bool:
    kind = type(module)
    if not kind.__module__.startswith("torch.nn.modules"):
        return True
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return bool(module.p)
    return any(word in kind.__name__ for word in _DRAWING)
