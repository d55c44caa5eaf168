"""One stage at work: its forward, and its backward at once or in two parts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from everstep.pipeline.engine.leaves import UnknownLeaves
from everstep.pipeline.engine.losses import LossPart
from everstep.pipeline.engine.nested import StageValue, unflatten_tensors, value_of
from everstep.pipeline.engine.split import Deferred, input_grad
from everstep.pipeline.engine.values import Gradients
from everstep.pipeline.errors import PipelineError
from everstep.pipeline.frontend.compiled import is_compiled
from everstep.pipeline.frontend.script_draws import ScriptDraws, compare_recomputation

OUTPUT = "output"  # what the model returns, as a value of the last stage
INPUT = "input:"  # before the name of an argument of the model


class RunnableStage(Protocol):
    """A part of the model, as the front end makes it.

    Attributes:
        inputs: Names of values of earlier stages, and `input:<argument>` for the model's own arguments.
        outputs: Names of values for later stages, and on the last stage also `output`, what the model returns.
        module: The module that holds the original parameters under their original names.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    module: nn.Module

    def __call__(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """All outputs, from all inputs."""


@dataclass
class Ran:
    """The result of a forward: the values of the edges, and on the last stage the loss or the model's output."""

    values: dict[str, StageValue]
    loss: LossPart | None = None
    output: Any = None


@dataclass
class _SavedForward:
    """The tensors of one micro-batch that are kept between its forward and its backward."""

    leaves: dict[str, list[Any]] = field(default_factory=dict)  # of each input: its tensors, or None without gradient
    results: dict[str, list[Any]] = field(default_factory=dict)  # of each output: its tensors with their graph
    loss: Any = None
    again: Callable[[], _SavedForward] | None = None  # a recomputation
    deferred: Deferred | None = None


Listen = Callable[[Sequence[Any]], contextlib.AbstractContextManager[None]]  # around a backward from these nodes
LossOf = Callable[[int, Any], LossPart | None]  # of a micro-batch and the model's output; None without targets


class StageRunner:
    """A stage module as the schedule runs it. `gradients`, `edges`: of each edge that comes in, and that goes out,
    whether it has a gradient; `around(microbatch, again)`: the context of each forward; `loss`: on the last stage."""

    def __init__(
        self,
        index: int,
        module: RunnableStage,
        gradients: Mapping[str, bool],
        edges: Mapping[str, bool],
        around: Callable[[int, bool], contextlib.AbstractContextManager[None]],
        loss: LossOf | None,
        *,
        recompute: bool,
    ) -> None:
        missing = [name for name in edges if name not in module.outputs] + [
            name for name in gradients if name not in module.inputs
        ]
        if missing:
            raise PipelineError(f"stage {index} does not have the values {', '.join(missing)} that its edges name")
        if loss is not None and OUTPUT not in module.outputs:
            raise PipelineError(f"the last stage gives no value {OUTPUT!r}, what the model returns")
        self.index, self.module = index, module
        self.repeats: Mapping[str, Sequence[int]] = getattr(module, "repeats", {})  # one made by hand has none
        self.arguments = [name.removeprefix(INPUT) for name in module.inputs if name.startswith(INPUT)]
        self.edges = list(gradients)
        self._gradients, self._outputs, self._around, self._loss = gradients, edges, around, loss
        self._recompute = recompute
        self._saved: dict[int, _SavedForward] = {}
        self._differentiated = 0  # losses of this step that had a graph
        self._draws = ScriptDraws(module.module)
        self._unknown = UnknownLeaves(index, module.module.parameters())
        self._compares = recompute  # whether the next recomputation is compared with the first forward

    def forward(
        self, microbatch: int, values: Mapping[str, StageValue], inputs: Mapping[str, Any], *, train: bool
    ) -> Ran:
        """`values` of the edges, `inputs` of the model itself; keeps what the backward needs if `train`."""
        again = train and self._recompute
        before, drawn = (self._written(), self._draws.get_state()) if again else ({}, [])
        with torch.set_grad_enabled(train and not self._recompute):
            saved, ran = self._run(microbatch, values, inputs, again=False)
        if train:
            self._declare_gradients(ran)
            if again:
                first = _list_results(ran) if self._compares else {}
                self._compares = False
                saved = _SavedForward(again=lambda: self._once_more(microbatch, values, inputs, before, drawn, first))
            self._saved[microbatch] = saved
        return ran

    def backward(
        self, microbatch: int, given: Mapping[str, Gradients], scale: float, listen: Listen | None = None
    ) -> dict[str, Gradients]:
        """Adds the gradients of the parameters to theirs; those of the inputs. `given`: of the outputs; `scale`: of the
        loss."""
        saved = self._take(microbatch)
        roots, gradients = self._collect_roots(saved, given, scale)
        if roots:
            with _listen_to_backward(listen, (torch.autograd.graph.get_gradient_edge(root).node for root in roots)):
                torch.autograd.backward(roots, gradients)
        found: dict[str, Gradients] = {}
        for name, leaves in saved.leaves.items():
            found[name] = [None if leaf is None else leaf.grad for leaf in leaves]
        return found

    def input_grad(self, microbatch: int, given: Mapping[str, Gradients], scale: float) -> dict[str, Gradients]:
        """The gradients of the inputs only; `weight_grad` does the rest."""
        saved = self._take(microbatch)
        roots, gradients = self._collect_roots(saved, given, scale)
        leaves = [leaf for each in saved.leaves.values() for leaf in each if leaf is not None]
        known, deferred = input_grad(roots, gradients, leaves)
        self._saved[microbatch] = _SavedForward(deferred=deferred)
        rest = iter(known)
        return {name: [None if leaf is None else next(rest) for leaf in each] for name, each in saved.leaves.items()}

    def weight_grad(self, microbatch: int, listen: Listen | None = None) -> None:
        """Run what `input_grad` left of the backward of this micro-batch."""
        deferred = self._saved.pop(microbatch).deferred
        assert deferred is not None
        with _listen_to_backward(listen, deferred.nodes):
            deferred.weight_grad()

    def take_differentiated(self) -> int:
        """Return how many losses of the step had a graph, and begin another one."""
        found, self._differentiated = self._differentiated, 0
        return found

    def clear(self) -> None:
        """Forget what a step that failed has left."""
        self._saved.clear()
        self._differentiated = 0

    def _take(self, microbatch: int) -> _SavedForward:
        saved = self._saved.pop(microbatch)
        return saved.again() if saved.again is not None else saved

    def _collect_roots(
        self, saved: _SavedForward, given: Mapping[str, Gradients], scale: float
    ) -> tuple[list[Any], Gradients]:
        roots, gradients = [], []
        for name, results in saved.results.items():
            for tensor, gradient in zip(results, given.get(name, [None] * len(results)), strict=True):
                if gradient is not None and tensor.requires_grad:
                    roots.append(tensor)
                    gradients.append(gradient)
        if saved.loss is not None and saved.loss.requires_grad:
            self._differentiated += 1
            roots.append(saved.loss)
            gradients.append(torch.full_like(saved.loss, scale))
        return roots, gradients

    def _once_more(
        self,
        microbatch: int,
        values: Mapping[str, StageValue],
        inputs: Mapping[str, Any],
        before: Mapping[str, Any],
        drawn: list[tuple[Any, Any]],
        first: Mapping[str, list[Any]],
    ) -> _SavedForward:
        now = {name: held[last] for name, held, last in self._places(before)}
        try:
            for name, held, last in self._places(before):
                held[last] = before[name]
            with torch.enable_grad(), self._draws.at(drawn):
                saved, ran = self._run(microbatch, values, inputs, again=True)
            compare_recomputation(self.index, first, _list_results(ran))
        finally:
            for name, held, last in self._places(now):
                held[last] = now[name]
        return saved

    def _written(self) -> dict[str, Any]:
        """Copies of what this forward will change and does not learn, so that it can be done again from there, and
        changes nothing more."""
        found = {}
        for name, held, last in self._places(getattr(self.module, "writes", ())):
            if not held[last].requires_grad:
                copy = held[last].detach().clone()
                found[name] = nn.Parameter(copy, False) if isinstance(held[last], nn.Parameter) else copy
        return found

    def _places(self, names: Iterable[str]) -> Iterator[tuple[str, dict[str, Any], str]]:
        for name in names:
            path, _, last = name.rpartition(".")
            module = self.module.module.get_submodule(path)
            yield name, module._buffers if last in module._buffers else module._parameters, last

    def _run(
        self, microbatch: int, values: Mapping[str, StageValue], inputs: Mapping[str, Any], *, again: bool
    ) -> tuple[_SavedForward, Ran]:
        saved, arguments = _SavedForward(), dict[str, Any]()
        for name in self.arguments:
            arguments[INPUT + name] = inputs[name]
        for name, asked in self._gradients.items():
            value = values[name]
            arguments[name], leaves = _make_leaves(name, value, asked and torch.is_grad_enabled())
            if any(leaf is not None for leaf in leaves):
                saved.leaves[name] = leaves
        with self._around(microbatch, again):
            given = self.module(arguments)
            output = given.get(OUTPUT)
            part = self._loss(microbatch, output) if self._loss is not None else None
        ran = Ran({}, part, output)
        for name in self._outputs:
            ran.values[name], saved.results[name] = value_of(name, given[name])
            if not self._outputs[name] and any(tensor.requires_grad for tensor in saved.results[name]):
                raise PipelineError(
                    f"value {name!r} of stage {self.index} has a gradient, but had none when pipeline() was called, "
                    "and the schedule sends none back: if parameters were unfrozen since, let all that shall ever "
                    "learn require gradients when pipeline() is called, and freeze them after it"
                )
        saved.loss = part.sum if part is not None else None
        if torch.is_grad_enabled():
            results = [each for made in saved.results.values() for each in made]
            leaves = [leaf for each in saved.leaves.values() for leaf in each if leaf is not None]
            self._unknown.look(results if saved.loss is None else [*results, saved.loss], leaves)
        return saved, ran

    def _declare_gradients(self, ran: Ran) -> None:
        """Say of values that have a gradient by the graph of the stages that they have one, also where they are made
        without: others know them so from the first step, and parameters may be frozen since, or be unfrozen later."""
        for name, value in ran.values.items():
            specs = tuple(
                spec._replace(gradient=self._outputs[name] and (spec.dtype.is_floating_point or spec.dtype.is_complex))
                for spec in value.layout.specs
            )
            value.layout = value.layout._replace(specs=specs)


def _make_leaves(name: str, value: StageValue, asked: bool) -> tuple[Any, list[Any]]:
    """A value as an argument, whose tensors are leaves of this stage's own graph; the leaves that have gradients."""
    tensors, leaves = [], []
    for tensor, spec in zip(value.tensors, value.layout.specs, strict=True):
        own = tensor.detach()
        has = spec.gradient and asked
        leaves.append(own.requires_grad_() if has else None)
        # The module gets no leaf: autocast takes leaves for weights. It would keep their copies, and with them all that
        # a stage receives, for other micro-batches, and add up gradients of several uses in the narrower type. A view
        # by view_as would have another stride for a single sample, and not be channels last to torch.
        tensors.append(own.expand(own.shape) if has else own)
    return unflatten_tensors(value.layout.structure, tensors), leaves


def _list_results(ran: Ran) -> dict[str, list[Any]]:
    """The tensors of what a forward gave; they hold no graph."""
    found = {name: value.tensors for name, value in ran.values.items()}
    return found if ran.loss is None else {**found, "the loss": [ran.loss.sum.detach()]}


def _listen_to_backward(listen: Listen | None, nodes: Iterable[Any]) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if listen is None else listen(list(nodes))


def why_not_split(module: RunnableStage) -> str | None:
    """Return the reason why a stage must run its backward at once; None if it can be split.

    A split backward asks parts of the graph twice, each time for other gradients: hooks would see both, and compiled
    code and recomputation would run twice.
    """
    if listens := getattr(module, "listens", ""):
        return f"{listens} has a hook on a tensor"
    for name, part in module.module.named_modules():
        if part._backward_hooks or part._backward_pre_hooks:
            return f"{name or 'the stage'} has backward hooks"
        if is_compiled(part):
            return f"{name or 'the stage'} is compiled"
    return None
