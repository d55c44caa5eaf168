"""Nodes at work, one after the other, as in a stage: what each of them takes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from everstep.pipeline.engine.split import Deferred, input_grad
from everstep.pipeline.engine.stage import RunnableStage, why_not_split

FEWEST = 3
Timer = Callable[[Callable[[], Any]], tuple[Any, float]]  # (result, seconds)


@dataclass
class Cost:
    """Seconds of each run, by turns with its `backward` at once and in two parts; bytes kept for backward, once for all
    micro-batches (`cast`), and of each value."""

    forward: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)
    input_grad: list[float] = field(default_factory=list)
    weight_grad: list[float] = field(default_factory=list)
    activation: int = 0
    cast: int = 0
    sizes: dict[str, int] = field(default_factory=dict)

    def take(self, others: Sequence[Cost]) -> None:
        """Take the times of other nodes, which do the same."""
        for other in others:
            self.forward += other.forward
            self.backward += other.backward
            self.input_grad += other.input_grad
            self.weight_grad += other.weight_grad

    def less(self, nothing: Cost) -> None:
        """Subtract the time of a node that does nothing: in a stage, nodes are not begun and timed one by one."""
        for own, other in (
            (self.forward, nothing.forward),
            (self.backward, nothing.backward),
            (self.input_grad, nothing.input_grad),
        ):
            own[:] = [max(seconds - median(other), 0.0) for seconds in own]


def run_microbatches(
    nodes: Mapping[str, RunnableStage],
    values: Mapping[str, Any],
    costs: Mapping[str, Cost],
    timer: Timer,
    *,
    repeats: int = 1,
    warmup: int = 0,
    seconds: float = math.inf,
    agree: Callable[[bool], bool] = bool,
) -> None:
    """Micro-batches by turns with a backward at once and in two parts, whose times `costs` gets.

    A forward is done before the backward of the micro-batch before, as in a step. Where all memory is free in between,
    the system takes it back, and getting it anew would be a part of the times. After `seconds` no more is run than is
    needed: once to warm up, and `FEWEST` repeats. `agree`, before each: whether any rank has come to say so.
    """
    before: list[_NodeRun] = []
    began = time.monotonic()
    for attempt in range(warmup + repeats):
        if agree(time.monotonic() - began > seconds):
            warmup = min(warmup, max(attempt, 1))
            if attempt >= warmup + FEWEST:
                break
        for split in (False, True):
            kept = costs if attempt >= warmup else {}
            runs = [_NodeRun(module, values, kept.get(name) or Cost(), timer, split) for name, module in nodes.items()]
            _run_backward(before)
            before = runs
    _run_backward(before)


def _run_backward(runs: list[_NodeRun]) -> None:
    """Run the backward of one micro-batch; nothing of it is left."""
    for each in reversed(runs):
        each.begin()
    while runs:
        runs.pop().end()


class _NodeRun:
    """A node's forward, and then its backward, at once or `split`."""

    def __init__(self, module: RunnableStage, values: Mapping[str, Any], cost: Cost, timer: Timer, split: bool) -> None:
        self._cost, self._timer, self._split = cost, timer, split
        self._whole = why_not_split(module) is not None
        self._weights = [each for each in module.module.parameters() if each.requires_grad]
        end = torch.zeros((), device="cpu", requires_grad=True)
        given = {name: copy_of(values[name], end) for name in module.inputs}
        self._asked = [end] if any(leaf.requires_grad for leaf in tensors_in(given)) else []
        with torch.enable_grad():
            made, seconds = timer(partial(module, given))
        cost.forward.append(seconds)
        self._results = [leaf for leaf in tensors_in(made) if leaf.requires_grad]
        self._deferred = Deferred()

    def begin(self) -> None:
        """The gradients of the inputs, if the backward is split."""
        seconds = 0.0
        if not self._split:
            return
        if self._whole:
            self._cost.input_grad.append(seconds)  # all is done at the end
            return
        if self._results and self._asked:
            given = self._gradients()
            (_, self._deferred), seconds = self._timer(partial(input_grad, self._results, given, self._asked))
        elif self._results and self._weights:
            edges = [torch.autograd.graph.get_gradient_edge(each) for each in self._results]
            self._deferred = Deferred(edges, self._gradients())
        self._cost.input_grad.append(seconds)
        self._results, self._asked = [], []

    def end(self) -> None:
        """The rest, or all of it; added to the gradients of the micro-batch before."""
        seconds = 0.0
        if self._split and not self._whole:
            if self._weights:
                _, seconds = self._timer(self._deferred.weight_grad)
            self._cost.weight_grad.append(seconds)
            return
        if self._results and (self._asked or self._weights):
            given, ends = self._gradients(), self._asked + self._weights
            _, seconds = self._timer(partial(torch.autograd.backward, self._results, given, inputs=ends))
        (self._cost.weight_grad if self._split else self._cost.backward).append(seconds)

    def _gradients(self) -> list[Any]:
        return [torch.ones_like(result) for result in self._results]


class _Nothing:
    """A node that gives what it gets."""

    inputs: tuple[str, ...] = ("value",)
    outputs: tuple[str, ...] = ("value",)

    def __init__(self) -> None:
        self.module = nn.Module()

    def __call__(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return dict(values)


def of_nothing(device: Any, timer: Timer, repeats: int = 50) -> Cost:
    """Return the cost of beginning and timing a node that does nothing."""
    cost, value = Cost(), torch.zeros(1, device=device, requires_grad=True)
    run_microbatches({"": _Nothing()}, {"value": value}, {"": cost}, timer, repeats=repeats, warmup=5)
    return cost


def make_timer(device: Any) -> Timer:
    def wall(work: Callable[[], Any]) -> tuple[Any, float]:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        result = work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return result, time.perf_counter() - start

    return wall


# ---- tensors ----


def tensors_in(value: Any) -> list[Any]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


class _End(torch.autograd.Function):  # type: ignore[misc]
    """A copy whose gradient is dropped: where autograd would keep it, that would take time which no stage takes."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, end: Any) -> Any:
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *gradient: Any) -> Any:
        return None, torch.zeros((), device="cpu")


def copy_of(value: Any, end: Any = None) -> Any:
    """Copy a value into memory of its own, as no leaf where there is a gradient: the node may change it in place.

    Gradients go to `end`, which becomes zero.
    """

    def copy(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return leaf.clone() if end is None or not leaf.requires_grad else _End.apply(leaf, end)

    with torch.enable_grad():
        return pytree.tree_map(copy, value)
