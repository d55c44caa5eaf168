"""How tensors get into a slot: by this process's own threads, or by a GPU while training goes on."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import torch
from torch.utils.hooks import RemovableHandle

_PIECE = 1 << 20  # bytes that a thread copies at a time, at least


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

    def adopt(self, address: int, size: int) -> None:
        pass

    def copy(
        self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], steady: Sequence[bool] = ()
    ) -> None:
        moves: list[tuple[int, int, int]] = []
        for target, source in zip(targets, sources, strict=True):
            to, from_ = _address(target), _address(source)
            if to and from_ and target.dtype is source.dtype:
                moves.append((to, from_, target.nbytes))
            else:
                target.copy_(source)
        self.move(moves)

    def move(self, moves: Sequence[tuple[int, int, int]]) -> None:
        """Copies bytes: (to, from, how many)."""
        if self._threads == 1 or sum(size for _, _, size in moves) < 2 * _PIECE:
            _move([moves])
            return
        # Whoever is free takes the next piece. The threads are new ones: those go to an idle processor, while one that
        # is woken up often stays on the processor of whoever woke it, and waits there for half of the copy.
        rest = iter(_pieces(moves, self._threads))
        with ThreadPoolExecutor(self._threads - 1, "everstep-copy") as pool:
            others = [pool.submit(_move, rest) for _ in range(self._threads - 1)]
            _move(rest)
        for each in others:
            each.result()

    def before_change(self) -> None:
        pass

    def done(self, wait: bool = False) -> bool:
        return True

    def close(self) -> None:
        pass


def _address(tensor: torch.Tensor) -> int:
    """Where its bytes lie in main memory one after the other; 0 for others, and for a wrapper, which has no address:
    torch knows how to copy them."""
    plain = tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
    return tensor.data_ptr() if plain else 0


Moves = list[tuple[int, int, int]]


def _move(pieces: Iterable[Sequence[tuple[int, int, int]]]) -> None:
    memmove = ctypes.memmove  # gives the interpreter lock away
    for piece in pieces:
        for to, from_, size in piece:
            memmove(to, from_, size)


def _pieces(moves: Sequence[tuple[int, int, int]], threads: int) -> list[Moves]:
    """The same copies in pieces: large ones first, since each takes the interpreter lock, and smaller ones in the end,
    for which no thread waits long (Polychronopoulos and Kuck, "Guided Self-Scheduling", 1987)."""
    left = sum(size for _, _, size in moves)
    pieces: list[Moves] = []
    room = 0
    for to, from_, size in moves:
        while size:
            if not room:
                room = max(_PIECE, left // (2 * threads))
                pieces.append([])
            taken = min(size, room)
            pieces[-1].append((to, from_, taken))
            to, from_, size = to + taken, from_ + taken, size - taken
            room, left = room - taken, left - taken
    return pieces


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
