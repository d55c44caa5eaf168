"""GPUs that are not there: streams, events, graphs and pinned memory behind torch.cuda's names, over main memory.

What a stream is given runs late, in an order that a seed draws from all that events and waits allow. A kernel reads
and writes memory when it runs: a wait that is missing shows as bytes of another time. Memory that nobody refers to is
given away and overwritten, as by a caching allocator.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import random
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch
from torch.overrides import TorchFunctionMode

from everstep.checkpoint.save import device_staging, saver
from everstep.checkpoint.state import steps

GARBAGE = 0x5A


class CudaFailure(RuntimeError):
    """The error that torch raises for one of the CUDA runtime."""


class Error(enum.IntEnum):
    success = 0
    cudaErrorMemoryAllocation = 2
    cudaErrorHostMemoryAlreadyRegistered = 712
    cudaErrorHostMemoryNotRegistered = 713


@dataclass(eq=False)
class Work:
    """One thing on a stream; it runs after those before it on the stream and after `after`."""

    run: Callable[[], None] = lambda: None
    after: tuple[Work, ...] = ()
    is_done: bool = False


class Stream:
    """torch.cuda.Stream."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        runtime = Runtime.current()
        self.device = runtime.device_of(device)
        self.queue: deque[Work] = deque()
        self.last = Work(is_done=True)
        self.graph: Graph | None = None  # that is being captured here
        self.is_copying = False  # has carried bytes to main memory or from it
        runtime.streams.append(self)

    def give(self, work: Work) -> None:
        runtime = Runtime.current()
        if self.graph is not None:
            if any(not each.is_done and each not in self.graph.works for each in work.after):
                raise CudaFailure("operation not permitted: dependency created on uncaptured work in another stream")
            self.graph.works.append(work)
            return
        if runtime.last_error is not Error.success:
            error, runtime.last_error = runtime.last_error, Error.success
            raise CudaFailure(f"CUDA error: {error.name}")
        self.queue.append(work)
        self.last = work

    def wait_event(self, event: Event) -> None:
        if event.recorded is not None:
            self.give(Work(after=(event.recorded,)))

    def wait_stream(self, stream: Stream) -> None:
        event = Event()
        event.record(stream)
        self.wait_event(event)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        runtime = Runtime.current()
        runtime.refuse_in_capture("synchronize")
        runtime.run_until(self.last)

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other


class Event:
    """torch.cuda.Event."""

    def __init__(self, **_: Any) -> None:
        self.recorded: Work | None = None

    def record(self, stream: Stream | None = None) -> None:
        runtime = Runtime.current()
        stream = stream or runtime.stream_of(runtime.here)
        work = Work()
        stream.give(work)
        self.recorded = work

    def wait(self, stream: Stream | None = None) -> None:
        runtime = Runtime.current()
        (stream or runtime.stream_of(runtime.here)).wait_event(self)

    def query(self) -> bool:
        runtime = Runtime.current()
        runtime.refuse_in_capture("query")
        runtime.failing("query")
        runtime.idle_looks -= 1
        if runtime.idle_looks < 0:
            runtime.run_some()
        return self.recorded is None or self.recorded.is_done

    def synchronize(self) -> None:
        runtime = Runtime.current()
        runtime.refuse_in_capture("synchronize")
        if self.recorded is not None:
            runtime.run_until(self.recorded)


class Graph:
    """torch.cuda.CUDAGraph."""

    def __init__(self) -> None:
        self.works: list[Work] = []
        self._stream: Stream | None = None

    def capture_begin(self) -> None:
        runtime = Runtime.current()
        self._stream = runtime.stream_of(runtime.here)
        self._stream.graph = self

    def capture_end(self) -> None:
        assert self._stream is not None
        self._stream.graph = None

    def replay(self) -> None:
        runtime = Runtime.current()
        stream = runtime.stream_of(runtime.here)
        for work in self.works:
            stream.give(Work(work.run))


@contextlib.contextmanager
def graph(captured: Graph) -> Iterator[None]:
    """torch.cuda.graph, which synchronises before it captures, on a stream of its own."""
    Runtime.current().synchronize()
    with Runtime.current().on_stream(Stream(Runtime.current().here)):
        captured.capture_begin()
        try:
            yield
        finally:
            captured.capture_end()


class Block:
    """An allocation; given away when no tensor refers to it, after what streams do that were noted for it."""

    def __init__(self, raw: torch.Tensor, stream: Stream) -> None:
        self.users = [stream]  # the first one is whose memory it is
        weakref.finalize(self, _give_away, raw, self.users, Runtime.current())


def _give_away(raw: torch.Tensor, users: list[Stream], runtime: Runtime) -> None:
    if runtime is not Runtime.now:
        return

    def overwrite() -> None:
        ctypes.memset(raw.untyped_storage().data_ptr(), GARBAGE, raw.untyped_storage().nbytes())

    if users[0].graph is None:
        users[0].give(Work(overwrite, tuple(each.last for each in users[1:])))


@dataclass
class Cudart:
    """torch.cuda.cudart(): registrations by address, and failures as a test wants them."""

    cudaError = Error
    registered: dict[int, int] = field(default_factory=dict)
    refuses: Error | None = None
    calls: list[str] = field(default_factory=list)

    def cudaHostRegister(self, address: int, size: int, flags: int) -> Error:
        self.calls.append(f"register on {Runtime.current().here}")
        if self.refuses is not None:
            return self._fail(self.refuses)
        if address in self.registered:
            return self._fail(Error.cudaErrorHostMemoryAlreadyRegistered)
        self.registered[address] = size
        return Error.success

    def cudaHostUnregister(self, address: int) -> Error:
        self.calls.append("unregister")
        assert all(not stream.queue for stream in Runtime.current().streams if stream.is_copying), "a copy still runs"
        if self.registered.pop(address, None) is None:
            return self._fail(Error.cudaErrorHostMemoryNotRegistered)
        return Error.success

    def cudaGetErrorString(self, error: Error) -> str:
        return error.name

    def _fail(self, error: Error) -> Error:
        Runtime.current().last_error = error
        return error


class Runtime:
    """All devices of this process."""

    now: Runtime | None = None

    def __init__(self, seed: int, devices: int) -> None:
        self.random = random.Random(seed)
        self.devices = devices
        self.here = torch.device("cuda", 0)
        self.streams: list[Stream] = []
        self.last_error = Error.success
        self.cudart = Cudart()
        self.pinned: set[int] = set()  # addresses of storages in main memory
        self.idle_looks = 0  # so often, an event is asked and nothing has run
        self.fails: dict[str, int] = {}  # calls by name until one fails
        self._current: dict[torch.device, Stream] = {}

    @classmethod
    def current(cls) -> Runtime:
        assert cls.now is not None
        return cls.now

    def failing(self, what: str) -> None:
        """Fails when a test has said so."""
        left = self.fails.get(what)
        if left is not None:
            self.fails[what] = left - 1
            if left <= 0:
                raise CudaFailure(f"CUDA error: an illegal memory access was encountered ({what})")

    def refuse_in_capture(self, what: str) -> None:
        if any(stream.graph is not None for stream in self.streams):
            raise CudaFailure(f"{what}: operation not permitted when stream is capturing")

    # ---- what runs, and when

    def ready(self) -> list[Stream]:
        return [each for each in self.streams if each.queue and all(work.is_done for work in each.queue[0].after)]

    def run_one(self) -> bool:
        ready = self.ready()
        if not ready:
            return False
        work = self.random.choice(ready).queue.popleft()
        work.run()
        work.is_done = True
        return True

    def run_some(self) -> None:
        for _ in range(self.random.choice((0, 0, 1, 2, 5))):
            self.run_one()

    def run_until(self, work: Work) -> None:
        while not work.is_done:
            assert self.run_one(), "a stream waits for what never comes"

    def run_all(self) -> None:
        while self.run_one():
            pass
        assert not any(stream.queue for stream in self.streams), "a stream waits for what never comes"

    # ---- names of torch.cuda

    def device_of(self, device: Any) -> torch.device:
        if device is None:
            return self.here
        found = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        found = self.here if found.index is None else found
        assert found.type == "cuda", found
        assert found.index < self.devices, f"there is no {found}"
        return found

    def stream_of(self, device: Any = None) -> Stream:
        found = self.device_of(device)
        if found not in self._current:
            self._current[found] = Stream(found)
        return self._current[found]

    @contextlib.contextmanager
    def on_device(self, device: Any) -> Iterator[None]:
        before, self.here = self.here, self.device_of(device)
        try:
            yield
        finally:
            self.here = before

    @contextlib.contextmanager
    def on_stream(self, stream: Stream) -> Iterator[None]:
        with self.on_device(stream.device):
            before, self._current[stream.device] = self.stream_of(stream.device), stream
            try:
                yield
            finally:
                self._current[stream.device] = before

    def is_capturing(self) -> bool:
        return self.stream_of(self.here).graph is not None

    def synchronize(self, device: Any = None) -> None:
        self.refuse_in_capture("synchronize")
        for stream in self.streams:
            if stream.device == self.device_of(device):
                self.run_until(stream.last)


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
