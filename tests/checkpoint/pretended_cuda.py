"""GPUs that are not there: streams, events, graphs and pinned memory behind torch.cuda's names, over main memory.

What a stream is given runs late, in an order that a seed draws from all that events and waits allow. A kernel reads
and writes memory when it runs: a wait that is missing shows as bytes of another time. Memory that nobody refers to is
given away and overwritten, as by a caching allocator.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
from torch.overrides import TorchFunctionMode

from everstep.checkpoint.save import device_staging, saver
from everstep.checkpoint.state import steps
from tests.checkpoint.pretended_runtime import (
    Block,
    Event,
    Graph,
    Runtime,
    Stream,
    Work,
    graph,
)

_NEW_IF_NEEDED = {"contiguous", "resolve_conj", "resolve_neg", "reshape"}
_VIEWS = _NEW_IF_NEEDED | {
    *("detach", "view", "view_as", "t", "transpose", "narrow", "conj", "requires_grad_", "expand", "__getitem__"),
    *("as_strided", "alias", "squeeze", "unsqueeze"),
}
_AT_ONCE = {"retain_grad", "register_hook"}


class GpuTensor(torch.Tensor):  # type: ignore[misc,unused-ignore]
    """A tensor in main memory that says to be on a GPU, and whose kernels run when its stream does."""

    _at: torch.device
    _block: Block

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _call(func, args, kwargs or {})

    def record_stream(self, stream: Any) -> None:
        self._block.users.append(stream)


def _call(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    name = func.__name__
    if name in ("__get__", "__set__", "__delete__"):
        return _property(func, args)
    if name == "copy_":
        return _copy(*args, **kwargs)
    if name == "is_pinned":
        return False
    gpu = next(each for each in _flat((args, kwargs)) if isinstance(each, GpuTensor))
    if name in ("cpu", "item", "tolist", "__bool__", "__float__", "equal", "numpy", "allclose", "__repr__"):
        Runtime.current().run_until(Runtime.current().stream_of(gpu._at).last)
        return _plainly(func, args, kwargs)
    if name in _VIEWS or name.startswith("is_") or name in _AT_ONCE:
        result = _plainly(func, args, kwargs)
        is_tensor = isinstance(result, torch.Tensor)
        if is_tensor and name in _NEW_IF_NEEDED and result.data_ptr() != gpu.data_ptr():
            return _later(func, args, kwargs, result, gpu)  # a new tensor
        return _on_gpu(result, gpu) if is_tensor else result
    if name.endswith("_") and not name.endswith("__"):
        raw, raw_kwargs = _raw(args), _raw(kwargs)
        Runtime.current().stream_of(gpu._at).give(Work(lambda: _run(func, raw, raw_kwargs)))
        return args[0]
    result = _plainly(func, args, kwargs)
    return _later(func, args, kwargs, result, gpu) if isinstance(result, torch.Tensor) else result


def _copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    runtime = Runtime.current()
    gpu = source if isinstance(source, GpuTensor) else target
    assert isinstance(gpu, GpuTensor)
    runtime.failing("copy")
    to, from_ = _raw(target), _raw(source)
    if not isinstance(target, GpuTensor) and isinstance(source, GpuTensor):
        assert source.is_contiguous(), "torch would need memory in between"
        assert not from_.is_conj(), "torch changes the target in main memory, before it is filled"
        assert not from_.is_neg(), "and this as well"
    stream = runtime.stream_of(gpu._at)
    stream.is_copying = True
    stream.give(Work(lambda: _run(torch.Tensor.copy_, (to, from_), {})))
    if not non_blocking:
        runtime.run_until(stream.last)
    return target


def _property(func: Any, args: Any) -> Any:
    name = func.__self__.__name__
    known = {"is_cuda": True, "is_cpu": False}
    if func.__name__ == "__get__" and name in known:
        return known[name]
    if func.__name__ == "__get__" and name == "device":
        return args[0]._at
    with torch._C.DisableTorchFunctionSubclass():
        if func.__name__ == "__set__" and name == "data":
            args[0]._block = args[1]._block
        result = func(*args)
    if isinstance(result, torch.Tensor) and not isinstance(result, GpuTensor) and name in ("data", "mT", "T"):
        return _on_gpu(result, args[0])
    return result


def _later(func: Any, args: Any, kwargs: dict[str, Any], result: torch.Tensor, gpu: GpuTensor) -> GpuTensor:
    """A new tensor, computed once its stream comes to it."""
    with torch._C.DisableTorchFunctionSubclass():
        result = result.detach().clone()
        result.untyped_storage()
    raw, raw_kwargs = _raw(args), _raw(kwargs)

    def compute() -> None:
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            result.copy_(func(*raw, **raw_kwargs))

    Runtime.current().stream_of(gpu._at).give(Work(compute))
    return on_gpu(result, gpu._at, copied=False)


def _run(func: Any, args: Any, kwargs: Any) -> None:
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        func(*args, **kwargs)


def _plainly(func: Any, args: Any, kwargs: Any) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _raw(value: Any) -> Any:
    """The same memory as plain tensors, which keep no block from being given away."""
    if isinstance(value, GpuTensor):
        with torch._C.DisableTorchFunctionSubclass():
            return value.detach().as_subclass(torch.Tensor)
    if isinstance(value, list | tuple):
        return type(value)(_raw(each) for each in value)
    if isinstance(value, dict):
        return {key: _raw(each) for key, each in value.items()}
    return value


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for each in value:
            yield from _flat(each)
    elif isinstance(value, dict):
        yield from _flat(list(value.values()))
    else:
        yield value


def _on_gpu(raw: torch.Tensor, like: GpuTensor) -> GpuTensor:
    """A view of the same allocation."""
    with torch._C.DisableTorchFunctionSubclass():
        made = raw if isinstance(raw, GpuTensor) else raw.as_subclass(GpuTensor)
    made._at, made._block = like._at, like._block
    return made


def on_gpu(tensor: torch.Tensor, device: Any = "cuda:0", *, copied: bool = True) -> GpuTensor:
    """The values of a tensor in the memory of a GPU."""
    runtime = Runtime.current()
    with torch._C.DisableTorchFunctionSubclass():
        raw = tensor.detach().clone(memory_format=torch.preserve_format) if copied else tensor
        made = raw.as_subclass(GpuTensor)
    made._at = runtime.device_of(device)
    made._block = Block(raw, runtime.stream_of(made._at))
    return cast(GpuTensor, made)


def pinned(tensor: torch.Tensor) -> torch.Tensor:
    """Page-locked memory of the script's own."""
    Runtime.current().pinned.add(tensor.untyped_storage().data_ptr())
    return tensor


class _Factories(TorchFunctionMode):  # type: ignore[misc,unused-ignore]
    """The functions that make tensors on a device that is not there, and those that plain tensors are asked."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        name = getattr(func, "__name__", "")
        if name == "is_pinned" and not isinstance(args[0], GpuTensor):
            return args[0].untyped_storage().data_ptr() in Runtime.current().pinned
        if kwargs.get("pin_memory"):
            return pinned(func(*args, **{**kwargs, "pin_memory": False}))
        if device is not None and torch.device(device).type == "cuda":
            result = on_gpu(func(*args, **{**kwargs, "device": "cpu"}), device)
            Runtime.current().stream_of(device).give(Work())
            return result
        return func(*args, **kwargs)


@contextlib.contextmanager
def own_steps() -> Iterator[steps.OptimizerSteps]:
    """Forget what is known of optimizers' steps, as a new process does."""
    fresh = steps.OptimizerSteps()
    with pytest.MonkeyPatch.context() as patch:
        for module in (steps, saver):
            patch.setattr(module, "STEPS", fresh)
        patch.setattr(device_staging.CudaStaging.__init__, "__defaults__", (fresh,))
        yield fresh


@contextlib.contextmanager
def pretended_cuda(seed: int = 0, devices: int = 2) -> Iterator[Runtime]:
    """Puts the pretended GPUs behind torch.cuda's names."""
    runtime = Runtime(seed, devices)
    names: dict[str, Any] = {
        "Stream": Stream,
        "Event": Event,
        "CUDAGraph": Graph,
        "graph": graph,
        "stream": runtime.on_stream,
        "device": runtime.on_device,
        "current_stream": runtime.stream_of,
        "current_device": lambda: runtime.here.index,
        "device_count": lambda: devices,
        "synchronize": runtime.synchronize,
        "is_initialized": lambda: True,
        "is_current_stream_capturing": runtime.is_capturing,
        "cudart": lambda: runtime.cudart,
    }
    with pytest.MonkeyPatch.context() as patch, own_steps(), _Factories():
        patch.setattr(Runtime, "now", runtime)
        patch.delenv("PYTORCH_NVML_BASED_CUDA_CHECK", raising=False)  # Lightning's: devices are then found by counting
        for name, value in names.items():
            assert hasattr(torch.cuda, name), f"torch.cuda has no {name}: what is pretended is not there"
            patch.setattr(torch.cuda, name, value)
        yield runtime
