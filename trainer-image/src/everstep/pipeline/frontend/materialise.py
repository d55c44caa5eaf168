"""Weights for the stages of one rank, when the model was built without any; no other rank's are ever allocated."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from everstep.pipeline.errors import PipelineError
from everstep.pipeline.frontend.skeleton import replace_tensor
from everstep.pipeline.frontend.stages import StageModule

Source = Mapping[str, Any] | Callable[[str], Any]  # the tensor of each name; KeyError for one that is not there


@contextlib.contextmanager
def without_weights() -> Iterator[None]:
    """Models that are built inside have their parameters on the meta device, and their buffers as they are.

    `torch.device("meta")` does it for buffers too, also for tables that no checkpoint holds.
    """

    def to_meta(module: nn.Module, name: str, parameter: Any) -> Any:
        if parameter is None or parameter.device.type == "meta":
            return None  # a tied parameter stays the same one
        return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)

    handle = register_module_parameter_registration_hook(to_meta)
    try:
        yield
    finally:
        handle.remove()


def materialise_stages(stages: Iterable[StageModule], source: Source, *, device: Any = "cpu") -> None:
    """Give what these stages have on the meta device its data, by its names in the whole model, on `device`.

    `source`: a state dictionary, a function that reads the tensor of a name, or `Seeded`. A tied parameter is read
    once, and is one tensor in all these stages. PipelineError if something is missing or of another shape.
    """
    made: dict[int, Any] = {}
    for stage in stages:
        for names, old in _without_data(stage.module):
            if id(old) not in made:
                made[id(old)] = _fill_from_source(names, old, source, device)
            replace_tensor(stage.module, old, made[id(old)])


class Seeded:
    """The initial weights of a model, by module: f(seed, name of the module), whatever number of stages there is.

    `initialise(module)` sets the parameters and buffers that are the module's own, not its submodules'. Without it, the
    module's `reset_parameters` does, then those of the modules around it, which may set what is in them as
    MultiheadAttention does, and then `_init_weights(module)` of the innermost module around it that has one, as a
    PreTrainedModel of transformers has. Drawn on the processor, so that all devices get the same.
    """

    def __init__(
        self, model: nn.Module, seed: int = 0, initialise: Callable[[nn.Module], object] | None = None
    ) -> None:
        self.model, self.seed, self.initialise = model, seed, initialise
        self._last: tuple[str, dict[str, Any]] = ("", {})

    def __call__(self, name: str) -> Any:
        """Return the data of one parameter or buffer.

        Raises:
            PipelineError: If nothing sets all of it.
        """
        path, _, last = name.rpartition(".")
        if self._last[0] != path or last not in self._last[1]:
            self._last = path, self._draw(path)
        return self._last[1].pop(last)

    def _draw(self, path: str) -> dict[str, Any]:
        module = self.model.get_submodule(path)
        both = (*module._parameters.items(), *module._buffers.items())
        missing = {name for name, tensor in both if tensor is not None and tensor.device.type == "meta"}
        first = self._initialised(path, module, is_second=False)
        others = {name for name in missing if not _can_be_nan(first[name])}
        unset = {name for name in missing - others if bool(first[name].isnan().any())}
        if others:
            second = self._initialised(path, module, is_second=True)
            unset |= {name for name in others if not torch.equal(first[name], second[name])}
        if unset:
            names = ", ".join(f"{path}.{name}" if path else name for name in sorted(unset))
            raise PipelineError(
                f"nothing sets {names} of {path or 'the model'} ({type(module).__name__}), or not all of it: neither "
                "reset_parameters nor _init_weights, its own or of the modules around it. Write one of them, give "
                "LayoutOptions.weights, or build it in everstep.pipeline.frontend.materialise.without_weights(), "
                "which leaves buffers their data"
            )
        return first

    def _initialised(self, path: str, module: nn.Module, *, is_second: bool) -> dict[str, Any]:
        """Return the tensors of a module after initialisation.

        Elements that nothing has set are as `_fill_with_sentinel` made them.
        """
        kept = dict(module._parameters), dict(module._buffers)
        seed = hashlib.blake2b(f"{self.seed}/{path}".encode(), digest_size=8).digest()
        try:
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                for held in (module._parameters, module._buffers):
                    for name, tensor in held.items():
                        if tensor is not None:
                            held[name] = made = _make_empty_like(tensor, "cpu")
                            if tensor.device.type == "meta":
                                _fill_with_sentinel(made, is_second=is_second)
                            else:
                                made.copy_(tensor)  # an initialiser may use a table, and does not change it
                torch.manual_seed(int.from_bytes(seed, "little", signed=True))
                initialisers = (
                    self._initialisers(path) if self.initialise is None else [partial(self.initialise, module)]
                )
                for initialise in initialisers:
                    initialise()
                both = (*module._parameters.items(), *module._buffers.items())
                return {name: tensor for name, tensor in both if tensor is not None}
        except NotImplementedError as error:
            raise PipelineError(
                f"{path or 'the model'} ({type(module).__name__}) cannot be initialised alone: its reset_parameters or "
                f"those of a module around it need the data of other modules: give LayoutOptions.weights ({error})"
            ) from error
        finally:
            module._parameters.update(kept[0])
            module._buffers.update(kept[1])

    def _initialisers(self, path: str) -> Iterator[Callable[[], object]]:
        """Yield the initialisers in the order in which construction calls them: the module's, then those of the modules
        around it."""
        module = self.model.get_submodule(path)
        parts = path.split(".") if path else []
        around = [self.model.get_submodule(".".join(parts[:count])) for count in range(len(parts), -1, -1)]
        for each in around:
            reset: Any = getattr(each, "reset_parameters", None) or getattr(each, "_reset_parameters", None)
            if reset is not None:
                yield reset
        holder: Any = next((each for each in around if _takes_a_module(getattr(each, "_init_weights", None))), None)
        if holder is not None:
            yield partial(holder._init_weights, module)


def _takes_a_module(function: Any) -> bool:
    if not callable(function):
        return False
    required = [each for each in inspect.signature(function).parameters.values() if each.default is each.empty]
    return len(required) == 1 and required[0].kind in (required[0].POSITIONAL_ONLY, required[0].POSITIONAL_OR_KEYWORD)


def _can_be_nan(tensor: Any) -> bool:
    return bool(tensor.is_floating_point() or tensor.is_complex())


def _fill_with_sentinel(tensor: Any, *, is_second: bool) -> None:
    """Fill memory with what no initialiser leaves there: NaN, or where there is none, another value each time."""
    if _can_be_nan(tensor):
        tensor.fill_(math.nan)
    else:
        tensor.fill_(is_second if tensor.dtype == torch.bool else 42 + is_second)


def _without_data(module: nn.Module) -> Iterator[tuple[Sequence[str], Any]]:
    """All names of each tensor on the meta device, the first in the model before others."""
    names: dict[int, list[str]] = {}
    tensors: dict[int, Any] = {}
    both = (module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
    for each in both:
        for name, tensor in each:
            if tensor.device.type == "meta":
                names.setdefault(id(tensor), []).append(name)
                tensors[id(tensor)] = tensor
    for key, tensor in tensors.items():
        yield names[key], tensor


def _fill_from_source(names: Sequence[str], old: Any, source: Source, device: Any) -> Any:
    data = None
    for name in names:
        try:
            data = source[name] if isinstance(source, Mapping) else source(name)
            break
        except KeyError:
            continue
    if data is None:
        raise PipelineError(
            f"there is no initial value of {' or '.join(names)}: it is on the meta device, and not in the given "
            "weights; build the model in without_weights() if it is a table that no state dictionary holds"
        )
    if tuple(data.shape) != tuple(old.shape):
        raise PipelineError(f"{names[0]} is of shape {tuple(old.shape)}, but its source gives {tuple(data.shape)}")
    if isinstance(source, Seeded) and _is_like(data, old, device):
        return _of_kind(old, data.detach())  # nobody else has it: twice the memory would be taken for a copy
    made = _make_empty_like(old, device)
    with torch.no_grad():
        made.copy_(data)
    return made


def _is_like(data: Any, old: Any, device: Any) -> bool:
    same = data.device == torch.device(device), data.dtype == old.dtype, data.stride() == old.stride()
    return all(same)


def _make_empty_like(like: Any, device: Any) -> Any:
    return _of_kind(like, torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device))


def _of_kind(like: Any, made: Any) -> Any:
    if not isinstance(like, nn.Parameter):
        return made
    parameter = nn.Parameter(made, requires_grad=like.requires_grad)
    if like._backward_hooks:  # what listens to its gradient does so still
        parameter._backward_hooks = like._backward_hooks
    if like._post_accumulate_grad_hooks:
        parameter._post_accumulate_grad_hooks = like._post_accumulate_grad_hooks
    return parameter
