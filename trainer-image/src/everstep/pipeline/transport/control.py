"""Let all processes of a job communicate beside a pipeline: before it is made, and where groups are.

Every wait here ends when another thread says so, whoever the others are and whatever they do.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from everstep.pipeline.errors import Everywhere
from everstep.pipeline.transport.base import TransportError
from everstep.pipeline.transport.sockets import Sockets

T = TypeVar("T")


_retired: list[Any] = []  # groups of this process


class Control:
    """A gloo group of all processes, which construct it together; `timeout`: of each wait, in seconds. All but `abort`
    is collective."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timedelta(seconds=timeout)
        self.reason = ""
        self._ends: list[Callable[[], None]] = []
        self.groups: list[Any] = []  # of this process, with those of others that stand on this one
        with Sockets.watch() as self._sockets:
            with self.explained():
                self.group = dist.new_group(backend="gloo", timeout=self.timeout)
            try:
                # Connections are made by the first use of a group; they are then known here.
                self.barrier()
            except TransportError:
                dist.destroy_process_group(self.group)  # others wait for this process, and now hear of it
                raise
        self._sockets.settle(self.gather)
        self.groups.append(self.group)
        _end_retired()

    @property
    def address(self) -> str | None:
        """Return the address of this process, as others reach it; None if there are no others, or it cannot be seen."""
        return self._sockets.address()

    def barrier(self) -> None:
        """All processes have come here. Whoever waits in the making of a group waits for its store, which nobody can
        end; so all meet before."""
        with self.explained():
            dist.barrier(group=self.group)

    def any(self, flag: bool) -> bool:
        """Tell whether one process says so, when all have come here."""
        found = torch.tensor(int(flag), device="cpu")
        with self.explained():
            dist.all_reduce(found, dist.ReduceOp.MAX, group=self.group)
        return bool(found)

    def gather(self, item: Any) -> list[Any]:
        """Return the items of all processes, in their order."""
        every: list[Any] = [None] * dist.get_world_size(self.group)
        with self.explained():
            dist.all_gather_object(every, item, group=self.group)
        return every

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """Return on all processes what the process `source` has; the others give a tensor of the same shape."""
        sent = tensor.detach().to("cpu", copy=True).contiguous()
        with self.explained():
            dist.broadcast(sent.view(-1).view(torch.uint8), src=source, group=self.group)
        return sent

    def first(self, work: Callable[[], str]) -> str:
        """Return on all processes what the first process makes; raise Everywhere on all if it fails."""
        told: list[Any] = [None]
        failure: Exception | None = None
        if dist.get_rank(self.group) == 0:
            try:
                told = [(work(), "")]
            except Exception as error:  # the others wait to be told
                failure, told = error, [("", str(error) or repr(error))]
        with self.explained():
            dist.broadcast_object_list(told, src=0, group=self.group)
        made, wrong = told[0]
        if wrong:
            raise Everywhere(wrong) from failure
        return str(made)

    def all(self, work: Callable[[], T]) -> T:
        """Return what this process makes, when all others have made theirs; nothing of `work` is collective.

        Raises:
            Everywhere: One process failed; the error has its number unless all say the same.
        """
        made, failure = None, None
        try:
            made = work()
        except Exception as error:  # the others wait to be told
            failure = error
        wrong = self.gather("" if failure is None else str(failure) or repr(failure))
        if any(wrong):
            alike = len(set(wrong)) == 1
            raise Everywhere(
                wrong[0] if alike else "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(wrong) if text)
            ) from failure
        return made  # type: ignore[return-value]  # it did not fail

    def retire(self) -> None:
        """Retire the groups: nothing is sent here any more.

        They are ended when all processes have come to the next Control: until then others may still read what was sent
        to them.
        """
        _retired.extend(self.groups)
        self.groups.clear()

    def on_abort(self, end: Callable[[], None]) -> None:
        """`end` is called by `abort` too."""
        self._ends.append(end)

    def abort(self, reason: str) -> None:
        """End what waits here, and is to wait, with TransportError(reason)."""
        self.reason = self.reason or reason
        self._sockets.shut()
        for end in self._ends:
            end()

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Errors of torch.distributed become TransportError, with the reason if it is known."""
        if self.reason:
            raise TransportError(self.reason)
        try:
            yield
        except RuntimeError as error:
            raise TransportError(self.reason or str(error).splitlines()[0]) from error


def _end_retired() -> None:
    if not _retired:
        return
    while _retired:
        # It may be gone already, with the group of all.
        with contextlib.suppress(RuntimeError, ValueError, AssertionError):
            dist.destroy_process_group(_retired.pop())
    # A pipeline and its engine know each other; their connections end with them.
    gc.collect()
