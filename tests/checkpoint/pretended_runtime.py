"""The runtime of pretended GPUs: devices, streams, events, graphs, and memory that is given away."""

from __future__ import annotations

import contextlib
import ctypes
import enum
import random
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

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
