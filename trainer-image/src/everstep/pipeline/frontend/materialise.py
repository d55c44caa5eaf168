"""Weights for the stages of one rank, when the model was built without any; no other rank's are ever allocated."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from everstep.pipeline.errors import PipelineError
from everstep.pipeline.frontend.skeleton import share
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


def materialise(stages: Iterable[StageModule], source: Source, *, device: Any = "cpu") -> None:
    """Gives what these stages have on the meta device its data, by its names in the whole model, on `device`.

    `source`: a state dictionary, a function that reads the tensor of a name, or `Seeded`. A tied parameter is read
    once, and is one tensor in all these stages. PipelineError if something is missing or of another shape.
    """
    made: dict[int, Any] = {}
    for stage in stages:
        for names, old in _without_data(stage.module):
            if id(old) not in made:
                made[id(old)] = _filled(names, old, source, device)
            share(stage.module, old, made[id(old)])


class Seeded:
    """The initial weights of a model, by module: f(seed, name of the module), whatever number of stages there is.

    `initialise(module)` sets the parameters and buffers that are the module's own, not its submodules'; without it, the
    module's `reset_parameters` does. Drawn on the processor, so that all devices get the same.
    """

    def __init__(
        self, model: nn.Module, seed: int = 0, initialise: Callable[[nn.Module], object] | None = None
    ) -> None:
        self.model, self.seed = model, seed
        self.initialise = initialise or _reset
        self._last: tuple[str, dict[str, Any]] = ("", {})

    def __call__(self, name: str) -> Any:
        """The data of one parameter or buffer."""
        path, _, last = name.rpartition(".")
        if self._last[0] != path or last not in self._last[1]:
            self._last = path, self._draw(path)
        return self._last[1].pop(last)

    def _draw(self, path: str) -> dict[str, Any]:
        module = self.model.get_submodule(path)
        kept = dict(module._parameters), dict(module._buffers)
        seed = hashlib.blake2b(f"{self.seed}/{path}".encode(), digest_size=8).digest()
        try:
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                for held in (module._parameters, module._buffers):
                    for name, tensor in held.items():
                        if tensor is not None:
                            held[name] = _empty(tensor, "cpu")
                torch.manual_seed(int.from_bytes(seed, "little", signed=True))
                self.initialise(module)
                return {
                    name: tensor
                    for held in (module._parameters, module._buffers)
                    for name, tensor in held.items()
                    if tensor is not None
                }
        except _Unknown:
            raise PipelineError(
                f"{path or 'the model'} ({type(module).__name__}) has no reset_parameters: give initialise=, build the "
                "model in without_weights() if buffers are what is missing, or give a state dictionary"
            ) from None
        finally:
            module._parameters.update(kept[0])
            module._buffers.update(kept[1])


class _Unknown(Exception):
    """Nothing says what a module begins with."""


def _reset(module: nn.Module) -> None:
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if reset is None:
        raise _Unknown
    reset()


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


def _filled(names: Sequence[str], old: Any, source: Source, device: Any) -> Any:
    data = None
    for name in names:
        try:
            data = source[name] if isinstance(source, Mapping) else source(name)
            break
        except KeyError:
            continue
    if data is None:
        raise PipelineError(
            f"nothing says what {' or '.join(names)} begins with: it is on the meta device and not in the source; "
            "build the model in without_weights() if it is a table that no state dictionary holds"
        )
    if tuple(data.shape) != tuple(old.shape):
        raise PipelineError(f"{names[0]} is of shape {tuple(old.shape)}, but its source gives {tuple(data.shape)}")
    if isinstance(source, Seeded) and _is_like(data, old, device):
        return _of_kind(old, data.detach())  # nobody else has it: twice the memory would be taken for a copy
    made = _empty(old, device)
    with torch.no_grad():
        made.copy_(data)
    return made


def _is_like(data: Any, old: Any, device: Any) -> bool:
    same = data.device == torch.device(device), data.dtype == old.dtype, data.stride() == old.stride()
    return all(same)


def _empty(like: Any, device: Any) -> Any:
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
