"""Random numbers that depend on neither the number of stages nor on recomputation.

Each module call draws from generators that are seeded by f(seed, step, micro-batch, module name, which call of it), and
leaves them with a seed that the code around it goes on with. So a module draws the same wherever, and however often, it
runs. What a module's own code draws beside its submodules belongs to it; such a module must not be cut, and the front
end does not.

A module that is compiled draws as one, and so must what is inside it: by the same compiled code wherever the model is
cut, but not as the same modules do uncompiled.

A call that draws nothing leaves no trace: the code around it goes on as if it had not been. So it makes no difference
whether such modules are left out, and a run that is resumed draws what it would have drawn uninterrupted.

Seeding costs some 8 µs a call, and half of that for dropout, which is seeded and needs nothing else: the code around
it goes on with its sequence. Modules of torch that never draw are left out from the start, others when the first step
has shown that they do not. The first micro-batch of each later step looks again, so that a module may begin to draw, as
one that adds noise after some steps.
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
from torch.compiler import is_dynamo_compiling
from torch.nn.modules.dropout import _DropoutNd

from everstep.pipeline.engine.generators import LinkedGenerators, generators_of
from everstep.pipeline.frontend.compiled import is_compiled

NOTHING: Mapping[str, Sequence[int]] = {}
_64_BITS = 2**64 - 1
_DRAWING = ("Dropout", "RReLU", "MultiheadAttention", "Transformer", "RNN", "LSTM", "GRU", "FractionalMaxPool")


def seed_of(seed: int, step: int, microbatch: int, name: str, call: int = 0) -> int:
    """64 bits from everything that a draw depends on."""
    return _scramble(_hash(f"{seed}/{step}/{microbatch}") ^ _hash(name), call)


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _scramble(value: int, number: int = 0) -> int:
    """One of the sequence of seeds that begins with a value, by splitmix64: a hash would take as long as a seeding."""
    value = (value + (number + 1) * 0x9E3779B97F4A7C15) & _64_BITS
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _64_BITS
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _64_BITS
    return value ^ (value >> 31)


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
    backward: int = 0  # the seed of its backward
    events: int = 0

    def next(self, seed: int) -> int:
        self.events += 1
        self.seeds[seed] = self.events
        return self.events


@dataclass
class _Frame:
    """A call under way: the seed and the state around it, its own seed, its event, and whether a call in it drew."""

    module: nn.Module
    around: int
    before: Any  # None where it is what the seed around gives
    seed: int
    event: int
    drew: bool = False


class Random:
    """Holds the generators of this rank, the device's and the processor's, for its modules; `modules`: by their names
    in the whole model."""

    def __init__(self, modules: Mapping[str, nn.Module], device: torch.device, seed: int) -> None:
        self.seed, self.step, self.microbatch = seed, 0, 0
        self._names: dict[nn.Module, str] = {}
        self._hashes: dict[str, int] = {}
        self._hashes_of_stages: dict[int, int] = {}
        self._base = 0  # the hash of all that a seed depends on beside the module and its call
        self._repeats = NOTHING
        self._drew: set[str] = set()
        self._inside = self._again = False
        self._asleep = False  # whether modules that have not drawn are left out
        self._watched: set[int] | None = None  # the stages whose first micro-batch of this step has run
        self._logs: dict[tuple[int, int], _Log] = {}
        self._log = _Log()
        self._frames: list[_Frame] = []
        self.drew_in_evaluation = False  # on this rank, in that under way
        self._quiet: int | None = None  # the seed after the last call that is in no other, where it is known
        # Modules on a device may draw on the processor too, as for the depth of a network or a mask.
        self._generator = LinkedGenerators(generators_of(device))
        self._hooks: list[Any] = []
        self._compiled: list[tuple[nn.Module, Any]] = []  # with what they were called by
        whole = tuple(f"{name}." for name, module in modules.items() if is_compiled(module))
        self._unhooked: dict[nn.Module, str] = {}
        for name, module in modules.items():
            # Hooks inside of what is compiled would only have it compiled anew.
            if _could_draw(module) and not name.startswith(whole):
                self._unhooked.setdefault(module, name)
        self._hook_modules()

    def _hook_modules(self) -> None:
        """Hook those that may draw; a script may give a dropout its probability at any step."""
        for module in [each for each in self._unhooked if not _is_dropout(each) or each.p]:
            name = self._names[module] = self._unhooked.pop(module)
            self._hashes[name] = _hash(name)
            if module._compiled_call_impl is not None:  # its hooks would be compiled too
                self._compiled.append((module, module._compiled_call_impl))
                module._compiled_call_impl = partial(self._call, module, module._compiled_call_impl)
            elif _is_dropout(module):
                self._hooks.append(module.register_forward_pre_hook(self._enter_dropout))
            else:
                self._hooks.append(module.register_forward_pre_hook(self._enter))
                self._hooks.append(module.register_forward_hook(self._leave))

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Put the generators back afterwards, which every forward and backward inside seeds."""
        before = self._generator.get_state()
        try:
            yield
        finally:
            self._generator.set_state(before)

    def of(
        self, microbatch: int, repeats: Mapping[str, Sequence[int]] = NOTHING, stage: int = 0
    ) -> contextlib.AbstractContextManager[None]:
        """Module calls inside belong to this micro-batch of all replicas and accumulated batches of the step.

        `repeats`: of modules that other stages call too, which of all their calls those inside are.
        """
        log = self._logs[stage, microbatch] = _Log()
        return _Forward(self, microbatch, repeats, log, stage)

    def again(
        self, microbatch: int, repeats: Mapping[str, Sequence[int]] = NOTHING, stage: int = 0
    ) -> contextlib.AbstractContextManager[None]:
        """Around a backward: what it does once more of the forward, as activation checkpoints do, draws the same; what
        only it draws begins with a seed of its own."""
        log = self._logs.get((stage, microbatch))
        return _Calls(self, microbatch, repeats, _Log() if log is None else log, again=True)

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
        self._watched = set()
        self._logs.clear()

    def _begin_forward(self, microbatch: int, stage: int, log: _Log) -> None:
        """Seed what a stage draws of a micro-batch, and look which modules may draw."""
        self._base = _hash(f"{self.seed}/{self.step}/{microbatch}")
        self._asleep = self._watched is not None and stage in self._watched
        if not self._asleep:
            self._hook_modules()
            if self._watched is not None:
                self._watched.add(stage)
        if stage not in self._hashes_of_stages:
            self._hashes_of_stages[stage] = _hash(f"/{stage}")
        seed = self._quiet = _scramble(self._base ^ self._hashes_of_stages[stage])
        self._generator.manual_seed(seed)
        log.next(seed)
        log.backward = _scramble(seed, 1)

    def _end_forward(self, microbatch: int, stage: int) -> None:
        """Warn of a module that draws, though it drew nothing in the first micro-batch of the step."""
        if self._asleep and self._quiet is not None and self._has_drawn_since(self._quiet):
            self._watched = None  # for the rest of the step
            warnings.warn(
                f"a module of stage {stage} draws random numbers, and drew none in the first micro-batch of this step: "
                f"those of micro-batch {microbatch} depend on how the model is cut; let it draw in all micro-batches",
                stacklevel=3,
            )

    def _call(self, module: nn.Module, call: Any, *args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():  # a part of what is compiled around it
            return call(*args, **kwargs)
        self._enter(module, args)
        result = call(*args, **kwargs)
        self._leave(module)
        return result

    def _enter_dropout(self, module: nn.Module, _: Any) -> None:
        """Seed what draws in each call. The code around it goes on with the sequence, so that nothing is to follow."""
        if is_dynamo_compiling() or not self._inside or not module.training or not module.p:
            return
        around = self._generator.initial_seed() if self._again else 0
        event, seed = self._find_call(self._names[module], around)
        if event is None:
            return
        self._generator.manual_seed(seed)
        if self._frames:
            self._frames[-1].drew = True
        else:
            self._quiet = None

    def _enter(self, module: nn.Module, _: Any) -> None:
        if is_dynamo_compiling():  # what is compiled draws as one, from the seed of the whole
            return
        if not self._inside:  # in eval mode too: `functional.dropout(x, 0.1)` draws in any
            return
        name = self._names[module]
        if not self._again and self._asleep and name not in self._drew:
            return
        around = self._generator.initial_seed()
        event, seed = self._find_call(name, around)
        if event is not None:
            # One that is known to draw is put back rarely, and stands where its last seed has set it: a copy of the
            # state takes as long as all the rest.
            is_plain = self._asleep and not self._again and not self._frames and around == self._quiet
            before = None if is_plain else self._generator.get_state()
            self._generator.manual_seed(seed)
            self._frames.append(_Frame(module, around, before, seed, event))

    def _find_call(self, name: str, around: int) -> tuple[int | None, int]:
        """Return the event of a call that begins where a generator was given the seed `around`, and its seed."""
        log = self._log
        if self._again:
            entered = log.entered.get(name, ())
            call = bisect_right(entered, log.seeds.get(around, 0))
            if call == len(entered):
                return None, 0
            return entered[call], log.begun[entered[call]]
        call = log.calls[name]
        log.calls[name] = call + 1
        number = _find_number(self._repeats[name], call) if name in self._repeats else call
        seed = _scramble(self._base ^ self._hashes[name], number)
        event = log.next(seed)
        log.entered[name].append(event)
        log.begun[event] = seed
        return event, seed

    def _leave(self, module: nn.Module, *_: Any) -> None:
        if is_dynamo_compiling():
            return
        if not self._frames or self._frames[-1].module is not module:
            return
        frame, name = self._frames.pop(), self._names[module]
        if not frame.drew and not self._has_drawn_since(frame.seed):
            if frame.before is None:
                self._generator.manual_seed(frame.around)
            else:
                self._generator.set_state(frame.before)
            if not self._again:
                self._log.entered[name].remove(frame.event)  # when it is repeated, it is not looked for
            return
        self._drew.add(name)
        if self._frames:
            self._frames[-1].drew = True
        if frame.event not in self._log.left:
            seed = self._log.left[frame.event] = _scramble(frame.around)
            self._log.next(seed)
        self._generator.manual_seed(self._log.left[frame.event])
        if not self._frames:
            self._quiet = self._log.left[frame.event]

    def _has_drawn_since(self, seed: int) -> bool:
        """Tell whether any code has drawn since the generator was given this seed; then seed it anew."""
        now = self._generator.get_state()
        self._generator.manual_seed(seed)
        return not self._generator.stands_at(now)


class _Calls:
    """A context in which module calls belong to one micro-batch. `Random.kept` puts the generators back.

    There are two of them for each micro-batch of each stage: a generator function would take half as long again.
    """

    __slots__ = ("_again", "_around", "_log", "_microbatch", "_random", "_repeats")

    def __init__(
        self, random: Random, microbatch: int, repeats: Mapping[str, Sequence[int]], log: _Log, *, again: bool
    ) -> None:
        self._random, self._microbatch, self._repeats, self._log, self._again = random, microbatch, repeats, log, again

    def __enter__(self) -> None:
        own = self._random
        self._around = own.microbatch, own._repeats, own._log, own._inside, own._again, own._frames
        own.microbatch, own._repeats, own._log = self._microbatch, self._repeats, self._log
        own._inside, own._again, own._frames = True, self._again, []
        if self._again:
            own._generator.manual_seed(self._log.backward)

    def __exit__(self, kind: Any, *_: object) -> None:
        own = self._random
        own.microbatch, own._repeats, own._log, own._inside, own._again, own._frames = self._around
        if own._again:  # a forward that was done once more for a backward, which begins now
            own._generator.manual_seed(own._log.backward)


class _Forward(_Calls):
    """The calls of a forward, which begin with a seed of their own."""

    __slots__ = ("_stage",)

    def __init__(
        self, random: Random, microbatch: int, repeats: Mapping[str, Sequence[int]], log: _Log, stage: int
    ) -> None:
        super().__init__(random, microbatch, repeats, log, again=False)
        self._stage = stage

    def __enter__(self) -> None:
        super().__enter__()
        self._random._begin_forward(self._microbatch, self._stage, self._log)

    def __exit__(self, kind: Any, *_: object) -> None:
        try:
            if kind is None:
                self._random._end_forward(self._microbatch, self._stage)
        finally:
            super().__exit__(kind)


def _find_number(repeats: Sequence[int], call: int) -> int:
    """Return which of all calls of a module that other stages call too this one is, counted in its own stage.

    A loop over data may call it more often than the trace did, here or in other stages: these calls have numbers of
    their own, by the cut, so that no two draw the same.
    """
    return repeats[call] if call < len(repeats) else (repeats[0] + 1 << 32) + call


def _is_dropout(module: nn.Module) -> bool:
    """Tell whether a module is one that draws in each call if it is in training and its probability is not 0."""
    return bool(type(module).__module__ == _DropoutNd.__module__)


def _could_draw(module: nn.Module) -> bool:
    kind = type(module)
    return not kind.__module__.startswith("torch.nn.modules") or any(word in kind.__name__ for word in _DRAWING)
