"""A stage as a module: original modules, and recorded operations between them, from values to values."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from everstep.pipeline.errors import PipelineError
from everstep.pipeline.frontend.patches import divisible_checkpoints
from everstep.pipeline.frontend.refs import Argument, Frame, Maker
from everstep.pipeline.frontend.sizes import SymbolSource, evaluate_size, solve_sizes, symbols_of
from everstep.pipeline.frontend.skeleton import Drawing
from everstep.pipeline.frontend.unseen import LateWrites, refuse_late_writes

INPUT = "input:"
OUTPUT = "output"


@dataclass(eq=False, slots=True)
class Step:
    """One call of a module or of a function. `inputs` makes (args, kwargs), by whether `owner` is training;
    `forget`: the values that nobody needs afterwards."""

    name: str
    func: Any
    owner: nn.Module
    inputs: dict[bool, Maker]
    put: Callable[[Any, Frame], None]
    forget: tuple[int, ...]
    context: Callable[[], contextlib.AbstractContextManager[Any]] | None = None

    def run(self, frame: Frame) -> None:
        args, kwargs = self.inputs[self.owner.training](frame)
        if self.context is None:
            result = self.func(*args, **kwargs)
        else:
            with self.context():
                result = self.func(*args, **kwargs)
        self.put(result, frame)
        for index in self.forget:
            frame.values.pop(index, None)


@dataclass(frozen=True)
class SizeRules:
    """The symbolic sizes that a stage needs.

    Attributes:
        places: Where symbols are read from its inputs.
        sizes: The sizes that its steps use.
        conditions: What must hold of the symbols, or the stage would compute something else.
        made: Where symbols are read that only modules within the stage know, by the number of the step.
        batch: The symbol of the number of samples.
    """

    places: Sequence[SymbolSource] = ()
    sizes: Sequence[Any] = ()
    conditions: Sequence[Any] = ()
    made: Mapping[int, Sequence[SymbolSource]] = field(default_factory=dict)
    batch: Any = None


@dataclass(frozen=True)
class StageUses:
    """The use that a stage makes of the model's modules and memory.

    Attributes:
        changed: Names of inputs that it changes in place.
        writes: Buffers, and parameters that do not learn, that it changes.
        weights: In the order of their first use, as far as that is known.
        repeats: Of modules that other stages call too, which of all their calls are this stage's.
        ends: Names of outputs through which nothing is differentiated, whatever their makers' gradients are.
    """

    changed: Collection[str] = ()
    writes: Collection[str] = ()
    weights: Sequence[str] = ()
    repeats: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    ends: Collection[str] = ()


class StageModule:
    """Part of a model. `inputs`: names of values of earlier stages, and `input:<argument>` of the model's own;
    `outputs`: names of values for later stages; of the last, `output`: what the model returns.

    `module` holds the original modules and parameters under their original names, and is where training flags are set.
    `both`: it may be called in training and in evaluation. `listens`: a node with a hook on a tensor.
    A call gives all outputs from all inputs, and changes none in place: what is in `uses.changed` is copied before.
    PipelineError if one is missing or of sizes that this model cannot have.
    """

    def __init__(
        self,
        index: int,
        module: nn.Module,
        inputs: Mapping[str, int | None],
        outputs: Mapping[str, int],
        steps: Sequence[Step],
        result: Maker | None,
        sizes: SizeRules,
        both: bool,
        uses: StageUses,
        listens: str = "",
    ) -> None:
        self.index, self.module, self.repeats = index, module, dict(uses.repeats)
        self.inputs = tuple(inputs)
        self.outputs = (*outputs, OUTPUT) if result else tuple(outputs)
        self._values = {name: value for name, value in inputs.items() if value is not None}
        self._arguments = [name.removeprefix(INPUT) for name, value in inputs.items() if value is None]
        self._outputs, self._steps, self._result = dict(outputs), list(steps), result
        self._places, self._sizes, self._conditions = list(sizes.places), list(sizes.sizes), list(sizes.conditions)
        self._made, self._known_sizes = dict(sizes.made), dict[tuple[int, ...], dict[Any, Any]]()
        self._batch = sizes.batch
        self._only = None if both else module.training
        self._changed, self.writes, self.listens = frozenset(uses.changed), tuple(sorted(uses.writes)), listens
        # What tells the device: it may be moved at any time, and to look for it takes as long as a small operation.
        self._first = next(((part, name) for part in module.modules() for name in part._parameters), None)
        self.uses, self._ends = tuple(uses.weights), frozenset(uses.ends)
        self._late: LateWrites | None = None

    def __call__(self, values: Mapping[str, Any]) -> dict[str, Any]:
        self.check_mode()
        try:
            frame = Frame(
                {index: values[name] for name, index in self._values.items()},
                {name: values[INPUT + name] for name in self._arguments},
                None,
            )
        except KeyError as missing:
            raise PipelineError(f"stage {self.index} did not receive the value {missing}") from None
        for name in self._changed:
            # Micro-batches are parts of one batch, and a forward may be done again: what it is given stays as it is.
            if name in self._values:
                frame.values[self._values[name]] = pytree.tree_map(_copy_leaf, frame.values[self._values[name]])
            else:
                frame.arguments[name] = pytree.tree_map(_copy_leaf, frame.arguments[name])
        frame.device = self._device(frame)
        symbols = self._read_sizes(self._places, frame, {})
        buffers = self._late.look() if self._late is not None else {}
        with divisible_checkpoints():
            for number, step in enumerate(self._steps):
                step.run(frame)
                if number in self._made:
                    symbols = self._read_sizes(self._made[number], frame, symbols)
        if self._late is not None:
            self._late.check(buffers)
        found = {name: frame.values[index] for name, index in self._outputs.items()}
        for name in self._ends:
            found[name] = pytree.tree_map(_detach_leaf, found[name])
        if self._result is not None:
            found[OUTPUT] = self._result(frame)
        return found

    def check_mode(self) -> None:
        """PipelineError if it is in a mode, training or evaluation, that the model was not cut for."""
        if self._only is not None and self.module.training != self._only:
            raise PipelineError(
                "the model's own code does something else in evaluation than in training, as adds noise, returns "
                "something more or takes a softmax: it is cut only for the mode in which it was traced, "
                f"{'training' if self._only else 'evaluation'}. Put that code into a module without modules in it, "
                "which returns new tensors in training, and as many in evaluation; return in both what only one mode "
                "needs, and let the loss leave it out; or call pipeline() once more with the model in the other mode"
            )

    def refuse_late_writes(self) -> None:
        """Let modules write nothing that they did not write in the trace, from now on."""
        self._late = LateWrites(self.module)
        refuse_late_writes(step.func for step in self._steps)

    def has(self, name: str) -> bool:
        """Tell whether it has the parameter or buffer that has this name in the model."""
        path, _, last = name.rpartition(".")
        try:
            module = self.module.get_submodule(path)
        except AttributeError:
            return False
        return last in module._parameters or last in module._buffers

    @property
    def calls(self) -> tuple[str, ...]:
        """Return what the stage runs, in this order: paths of modules, and names of operations, which have a colon."""
        return tuple(step.name for step in self._steps)

    def _device(self, frame: Frame) -> Any:
        if self._first is not None and (weight := self._first[0]._parameters.get(self._first[1])) is not None:
            return weight.device
        for weight in self.module.parameters():
            return weight.device
        tensors = (value for value in frame.values.values() if isinstance(value, torch.Tensor))
        return next((tensor.device for tensor in tensors), torch.device("cpu"))

    def _read_sizes(self, places: Sequence[SymbolSource], frame: Frame, known: Mapping[Any, int]) -> dict[Any, int]:
        """Return the values of these symbols and of those that were known, and let the frame have the sizes of them."""
        if not places:
            return {**known}
        shapes = {place.tensor: _get_tensor(place.tensor, frame).shape for place in places}
        values = {**known, **solve_sizes(places, shapes)}
        key = tuple(values.values())  # always of the same symbols, or of fewer
        if key not in self._known_sizes:
            for condition in self._conditions:
                if symbols_of([condition]) <= values.keys() and evaluate_size(condition, values) is False:
                    raise self._make_path_error(condition, values)
            sizes = [size for size in self._sizes if symbols_of([size.expr]) <= values.keys()]
            self._known_sizes[key] = {size: size.kind(evaluate_size(size.expr, values)) for size in sizes}
        frame.sizes = self._known_sizes[key]
        return values

    def _make_path_error(self, condition: Any, values: Mapping[Any, int]) -> PipelineError:
        advice = "give batches for which this holds, or call pipeline() with an example of these sizes"
        if symbols_of([condition]) == {self._batch}:  # which no example fixes
            advice = (
                f"{self._batch} is the number of samples of a micro-batch: take fewer micro-batches, or leave out a "
                "smaller batch at the end of an epoch, as by drop_last=True"
            )
        return PipelineError(
            f"stage {self.index}: sizes {dict(values)} take another path through the model's code than the one that "
            f"was traced, where {condition}: {advice}"
        )


def _copy_leaf(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


def _detach_leaf(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


def _get_tensor(where: Any, frame: Frame) -> Any:
    if isinstance(where, Argument):
        found = frame.arguments[where.name]
        for key in where.path:
            found = found[key]
        return found
    return frame.values[where.index]


def make_context(
    grad: bool, autocast: tuple[str, Any, bool] | None
) -> Callable[[], contextlib.AbstractContextManager[Any]] | None:
    """Return a function that restores what was around an operation or a call, beside what is around the model.

    None if there was nothing.
    """
    if grad and autocast is None:
        return None

    @contextlib.contextmanager
    def around() -> Any:
        with contextlib.ExitStack() as stack:
            if not grad:
                stack.enter_context(torch.no_grad())
            if autocast is not None:
                device, dtype, enabled = autocast
                stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled))
            yield

    return around


def read_argument(name: str, path: tuple[Any, ...], frame: Frame) -> Any:
    found = frame.arguments[name]
    for key in path:
        found = found[key]
    return found


def draw_with_state(module: Drawing, func: Any, *args: Any, **kwargs: Any) -> Any:
    return module(func, args, kwargs)


def register_tensor_hook(func: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
    # Where there are no gradients, as in an evaluation or a forward that is done again, there is nothing to hear of.
    return func(tensor, *args, **kwargs) if tensor.requires_grad else None
