"""Copy tensors into a slot: by this process's own threads here, by a GPU in `device_staging`."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch

from everstep.checkpoint.host.thread_pool import ThreadPool

_PIECE = 1 << 20  # bytes that a thread copies at a time, at least


class Staging(Protocol):
    """Copies the state of a step. Training may go on once `copy` has returned."""

    def adopt(self, memory: torch.Tensor) -> None:
        """Take the bytes of a slot that copies will go to, before the first one does."""
        ...

    def copy(
        self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], steady: Sequence[bool] = ()
    ) -> None:
        """Begin to copy; both are of the same types and shapes.

        `steady`: which sources nobody changes before the next step of an optimizer; none of them by default.
        """
        ...

    def wait_for_copy(self) -> None:
        """Whatever is computed next may change all of the state: it waits for the copy, this process does not."""
        ...

    def is_copied(self) -> bool:
        """Return whether the bytes of the last copy are there. CheckpointError when they never will be."""
        ...

    def wait_until_copied(self, timeout_seconds: float) -> bool:
        """Wait for that, this long at most; return whether they are there."""
        ...

    def close(self) -> None:
        """Give back what it holds, after the last copy; may be called again."""
        ...


class Host:
    """Copies in main memory, by as many threads as torch computes with; the copy is there on return.

    memmove is what a plain copy would be, too: torch's own copy goes through the cache and is slower on one thread.
    """

    def __init__(self) -> None:
        self._threads = torch.get_num_threads()

    def adopt(self, memory: torch.Tensor) -> None:
        pass

    def copy(
        self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], steady: Sequence[bool] = ()
    ) -> None:
        moves: list[tuple[int, int, int]] = []
        for target, source in zip(targets, sources, strict=True):
            to, from_ = _get_address(target), _get_address(source)
            if to and from_ and target.dtype is source.dtype:
                moves.append((to, from_, target.nbytes))
            else:
                target.copy_(source)
        self.move(moves)

    def move(self, moves: Sequence[tuple[int, int, int]]) -> None:
        """Copies bytes: (to, from, how many)."""
        if self._threads == 1 or sum(size for _, _, size in moves) < 2 * _PIECE:
            _copy_pieces([moves])
            return
        # Whoever is free takes the next piece. The threads are new ones: those go to an idle processor, while one that
        # is woken up often stays on the processor of whoever woke it, and waits there for half of the copy.
        rest = iter(_split_moves(moves, self._threads))
        with ThreadPool(self._threads - 1, "everstep-copy") as pool:
            others = [pool.submit(_copy_pieces, rest) for _ in range(self._threads - 1)]
            _copy_pieces(rest)
        for each in others:
            each.result()

    def wait_for_copy(self) -> None:
        pass

    def is_copied(self) -> bool:
        return True

    def wait_until_copied(self, timeout_seconds: float) -> bool:
        return True

    def close(self) -> None:
        pass


def _get_address(tensor: torch.Tensor) -> int:
    """Return the address in main memory where its bytes lie in one piece; 0 for others, and for a wrapper.

    A wrapper has no address: torch knows how to copy it.
    """
    plain = tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
    return tensor.data_ptr() if plain else 0


Moves = list[tuple[int, int, int]]


def _copy_pieces(pieces: Iterable[Sequence[tuple[int, int, int]]]) -> None:
    memmove = ctypes.memmove  # gives the interpreter lock away
    for piece in pieces:
        for to, from_, size in piece:
            memmove(to, from_, size)


def _split_moves(moves: Sequence[tuple[int, int, int]], threads: int) -> list[Moves]:
    """Return the same copies in pieces.

    Large ones come first, since each takes the interpreter lock, and smaller ones in the end, for which no thread waits
    long (Polychronopoulos and Kuck, "Guided Self-Scheduling", 1987).
    """
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
