"""How tensors get into a slot: by this process's own threads, or by a GPU while training goes on."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import torch
from torch.utils.hooks import RemovableHandle

_PIECE = 4 << 20  # bytes that one thread copies at a time


class Staging(Protocol):
    """Copies the state of a step. Training may go on once `copy` has returned."""

    def adopt(self, address: int, size: int) -> None:
        """Memory of a slot that copies will go to, before the first one does."""
        ...

    def copy(
        self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], steady: Sequence[bool] = ()
    ) -> None:
        """Begins to copy; both are of the same types and shapes. `steady`: which sources nobody changes before the next
        step of an optimizer; none of them by default."""
        ...

    def before_change(self) -> None:
        """Whatever is computed next may change all of the state: it waits for the copy, this process does not."""
        ...

    def done(self, wait: bool = False) -> bool:
        """Whether the bytes of the last copy are there."""
        ...

    def close(self) -> None: ...


class Host:
    """Copies in main memory, by as many threads as torch computes with; the copy is there on return.

    memmove is what a plain copy would be, too: torch's own copy goes through the cache and is slower on one thread.
    """

    def __init__(self) -> None:
        self._threads = torch.get_num_threads()
        self._pool = ThreadPoolExecutor(self._threads, "everstep-copy") if self._threads > 1 else None

    def adopt(self, address: int, size: int) -> None:
        pass

    def copy(
        self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], steady: Sequence[bool] = ()
    ) -> None:
        moves: list[tuple[int, int, int]] = []
        for target, source in zip(targets, sources, strict=True):
            if all(_is_plain(each) for each in (target, source)) and target.dtype == source.dtype:
                moves.append((target.data_ptr(), source.data_ptr(), target.nbytes))
            else:
                target.copy_(source)
        self.move(moves)

    def move(self, moves: Sequence[tuple[int, int, int]]) -> None:
        """Copies bytes: (to, from, how many)."""
        if self._pool is None or sum(size for _, _, size in moves) < 2 * _PIECE:
            _move(moves)
            return
        list(self._pool.map(_move, _shares(moves, self._threads)))

    def before_change(self) -> None:
        pass

    def done(self, wait: bool = False) -> bool:
        return True

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether its bytes lie in main memory one after the other."""
    plain = tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
    return plain and tensor.data_ptr() != 0  # a wrapper has no address: torch knows how to copy it


def _move(moves: Sequence[tuple[int, int, int]]) -> None:
    memmove = ctypes.memmove  # gives the interpreter lock away
    for to, from_, size in moves:
        memmove(to, from_, size)


def _shares(moves: Sequence[tuple[int, int, int]], count: int) -> list[list[tuple[int, int, int]]]:
    """The same copies for `count` threads, as many bytes for each."""
    share = -(-sum(size for _, _, size in moves) // count)
    shares: list[list[tuple[int, int, int]]] = [[]]
    left = share
    for to, from_, size in moves:
        while size:
            if not left:
                shares.append([])
                left = share
            taken = min(size, left)
            shares[-1].append((to, from_, taken))
            to, from_, size, left = to + taken, from_ + taken, size - taken, left - taken
    return shares


class Cuda:
    """Copies from a GPU on a stream of its own into pinned slots, while the forward and backward passes go on.

    What optimizers hold is next changed by their step: before it the GPU (not this process) waits for the copy. All
    else, as the statistics of a BatchNorm, the next forward pass may change: training's own stream copies it, first.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._event: torch.cuda.Event | None = None
        self._captured = False  # a step within a CUDA graph: when it is run, no hook is called
        self._pinned: list[int] = []
        self._host = Host()
        self._hook: RemovableHandle = torch.optim.optimizer.register_optimizer_step_pre_hook(self._before_step)

    def adopt(self, address: int, size: int) -> None:
        if torch.cuda.cudart().cudaHostRegister(address, size, 0).value == 0:
            self._pinned.append(address)  # where it cannot be pinned the copy is synchronous, and still right

    def copy(
        self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], steady: Sequence[bool] = ()
    ) -> None:
        now, later, on_host = sort(targets, sources, () if self._captured else steady)
        training = torch.cuda.current_stream(self._stream.device)
        for to, from_ in now:
            to.copy_(from_, non_blocking=True)
        self._stream.wait_stream(training)
        with torch.cuda.stream(self._stream):
            for to, from_ in later:
                to.copy_(from_, non_blocking=True)
                from_.record_stream(self._stream)
            self._event = torch.cuda.Event()
            self._event.record(self._stream)
        self._host.copy([to for to, _ in on_host], [from_ for _, from_ in on_host])

    def before_change(self) -> None:
        if self._event is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(self._event)

    def done(self, wait: bool = False) -> bool:
        if self._event is None:
            return True
        if wait:
            self._event.synchronize()
        return bool(self._event.query())

    def close(self) -> None:
        self.done(wait=True)
        self._hook.remove()
        self._host.close()
        for address in self._pinned:
            with contextlib.suppress(RuntimeError):
                torch.cuda.cudart().cudaHostUnregister(address)

    def _before_step(self, *_: Any) -> None:
        if torch.cuda.is_current_stream_capturing():
            self._captured = True
        else:
            self.before_change()


Pairs = list[tuple[torch.Tensor, torch.Tensor]]


def sort(
    targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], steady: Sequence[bool]
) -> tuple[Pairs, Pairs, Pairs]:
    """What is copied before training goes on, beside it, and in main memory."""
    now, later, on_host = Pairs(), Pairs(), Pairs()
    for to, from_, kept in zip(targets, sources, steady or [False] * len(sources), strict=True):
        where = on_host if from_.is_cpu else later if kept else now
        where.append((to, from_))
    return now, later, on_host


def choose(tensors: Sequence[torch.Tensor]) -> Staging:
    """The staging for a state: a GPU's where any of it is on one."""
    devices = {tensor.device for tensor in tensors if tensor.is_cuda}
    return Cuda(devices.pop()) if devices else Host()
