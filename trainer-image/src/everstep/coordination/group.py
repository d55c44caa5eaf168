"""All ranks as one group over gloo: they tell each other small objects, and do something alike or not at all."""

from __future__ import annotations

import contextlib
import datetime
import json
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn, TypeVar, cast

import torch
import torch.distributed as dist

from everstep.coordination.errors import ErrorTypes

T = TypeVar("T")

_LOST = -1  # instead of a length: what follows are the ranks that were lost
_LEFT = "left, or did not come in time"


class RankGroup:
    """All ranks of a job, whatever training uses for its tensors; a process alone is a group too.

    All but close() is collective. A group holds descriptors and threads of gloo until it is closed: whoever opens one
    keeps it for its own life, and nobody opens one for each call.

    Args:
        group: A gloo group of all ranks; None for one process.
        errors: The errors that are raised.
    """

    def __init__(self, group: dist.ProcessGroup | None, errors: ErrorTypes | None = None) -> None:
        self.group = group
        self.errors = errors or ErrorTypes()
        self.rank: int = 0 if group is None else dist.get_rank(group)
        self.size: int = 1 if group is None else dist.get_world_size(group)

    @classmethod
    def open(cls, timeout_seconds: float, errors: ErrorTypes | None = None) -> RankGroup:
        """Make the group of all ranks of the default process group; of this process alone where there is none.

        Args:
            timeout_seconds: How long a rank waits for the others in each collective.
            errors: See RankGroup.
        """
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return cls(None, errors)
        timeout = datetime.timedelta(seconds=timeout_seconds)
        alone = cls(None, errors)
        with alone.naming_errors():
            group = cast("dist.ProcessGroup", dist.new_group(backend="gloo", timeout=timeout))
        return cls(group, errors)

    def close(self) -> None:
        """Give back descriptors and threads, if they have not gone with the default process group. Not collective."""
        group, self.group = self.group, None
        if group is not None and dist.is_available() and dist.is_initialized():
            with contextlib.suppress(RuntimeError, ValueError, AssertionError):
                dist.destroy_process_group(group)

    def barrier(self) -> None:
        """Wait until all ranks have come here."""
        if self.group is not None:
            with self.naming_errors():
                dist.barrier(group=self.group)

    def any(self, flag: bool) -> bool:
        """Tell whether a rank says so."""
        found = torch.tensor(int(flag), device="cpu")
        if self.group is not None:
            with self.naming_errors():
                dist.all_reduce(found, dist.ReduceOp.MAX, group=self.group)
        return bool(found)

    def gather(self, mine: T) -> list[T]:
        """Return the objects of all ranks, in their order."""
        found: list[T] = [mine] * self.size
        if self.group is not None:
            with self.naming_errors():
                dist.all_gather_object(found, mine, group=self.group)
        return found

    def broadcast(self, mine: T) -> T:
        """Return the object that rank 0 passed."""
        told = [mine]
        if self.group is not None:
            with self.naming_errors():
                dist.broadcast_object_list(told, src=0, group=self.group)
        return told[0]

    def run_on_all_ranks(self, work: Callable[[], T]) -> T:
        """Return what `work` makes on this rank, if it succeeds on all ranks.

        Else a rank that fails would leave the others to wait for it in their next collective.

        Args:
            work: Called once on each rank; nothing in it is collective.

        Raises:
            Exception: The error of `work`, where it failed here; see name_failures().
            RankLost: A rank is lost.
        """
        made, failure = _attempt(work)
        wrong = self.gather(_say(failure))
        if any(wrong):
            self._fail(wrong, failure)
        return cast(T, made)  # it did not fail

    def run_on_first_rank(self, work: Callable[[], T]) -> T:
        """Return on all ranks what `work` makes on rank 0, which alone calls it. It must be possible to pickle that.

        Raises:
            Exception: The error of `work`, where it failed here; see name_failures().
            RankLost: A rank is lost.
        """
        made, failure = _attempt(work) if self.rank == 0 else (None, None)
        told, wrong = self.broadcast((made, _say(failure)))
        if wrong:
            self._fail([wrong] * self.size, failure)
        return cast(T, told)

    def name_failures(self, wrong: Sequence[str], mine: Exception | None) -> Exception:
        """Return the error of this rank where work failed on some: its own, else one with the texts of the others'.

        Args:
            wrong: The text of each rank's error, in order; empty where it did not fail.
            mine: The error of this rank.
        """
        return mine or self.errors.failed(join_failures(wrong))

    def gather_bytes(self, mine: bytes) -> list[bytes] | None:
        """Return on rank 0 what each rank gave, in their order, and None on all others.

        Unlike with gather(), no rank but rank 0 holds what others gave, and nothing is padded. Rank 0 answers with
        scatter_bytes(); where a rank is lost, it tells all others there.

        Raises:
            RankLost: On rank 0, with the ranks that are gone.
        """
        if self.rank != 0:
            with self.naming_errors():
                self._send(mine, len(mine), 0)
            return None
        found, lost = [mine], []
        for rank in range(1, self.size):
            try:
                found.append(self._receive(rank)[0])
            except RuntimeError:
                lost.append(rank)
        if lost:
            words = json.dumps(lost).encode()
            for rank in range(1, self.size):
                with contextlib.suppress(RuntimeError):
                    if rank not in lost:
                        self._send(words, _LOST - len(words), rank)
            raise self.errors.lost(lost, _LEFT)
        return found

    def scatter_bytes(self, messages: Sequence[bytes] | None) -> bytes:
        """Return what rank 0 gave to this rank.

        Args:
            messages: One for each rank, on rank 0; None on the others.

        Raises:
            RankLost: Rank 0 is gone, or says that others are.
        """
        if messages is None:
            with self.naming_errors():
                answer, is_lost = self._receive(0)
            if is_lost:
                raise self.errors.lost(json.loads(answer), _LEFT)
            return answer
        lost = []
        for rank in range(1, self.size):
            try:
                self._send(messages[rank], len(messages[rank]), rank)
            except RuntimeError:
                lost.append(rank)
        if lost:
            raise self.errors.lost(lost, _LEFT)
        return messages[0]

    def naming_errors(self) -> contextlib.AbstractContextManager[None]:
        """Make the errors of torch.distributed within ones of lost ranks: a broken connection stands for a rank."""
        return self._naming_lost_ranks()

    @contextlib.contextmanager
    def _naming_lost_ranks(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise self.errors.lost((), f"{_LEFT} ({str(error).splitlines()[0]})") from error

    def _fail(self, wrong: Sequence[str], mine: Exception | None) -> NoReturn:
        error = self.name_failures(wrong, mine)
        if error is mine:
            raise error
        raise error from mine

    def _send(self, data: bytes, length: int, rank: int) -> None:
        dist.send(torch.tensor([length], device="cpu"), rank, group=self.group)
        if data:
            dist.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), rank, group=self.group)

    def _receive(self, rank: int) -> tuple[bytes, bool]:
        """Return what that rank sent, and whether it is a list of lost ranks."""
        length = torch.zeros(1, dtype=torch.int64, device="cpu")
        dist.recv(length, rank, group=self.group)
        size = int(length)
        data = torch.empty(size if size >= 0 else _LOST - size, dtype=torch.uint8, device="cpu")
        if len(data):
            dist.recv(data, rank, group=self.group)
        return data.numpy().tobytes(), size < 0


def join_failures(wrong: Sequence[str]) -> str:
    """Return the texts of all ranks' errors as one: each once with its rank, or one alone where all ranks say it."""
    if len(set(wrong)) == 1:
        return wrong[0]
    return "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(wrong) if text)


def _attempt(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return work(), None
    except Exception as error:  # the others wait to be told
        return None, error


def _say(failure: Exception | None) -> str:
    return "" if failure is None else str(failure) or repr(failure)
