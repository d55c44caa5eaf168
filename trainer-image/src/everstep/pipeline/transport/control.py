"""Let all processes of a job communicate beside a pipeline: before it is made, and where groups are.

Every wait here ends when another thread says so, whoever the others are and whatever they do.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from everstep.coordination.group import RankGroup, join_failures
from everstep.pipeline.errors import Everywhere
from everstep.pipeline.transport.base import TransportError
from everstep.pipeline.transport.group_connections import GroupConnections

_retired: list[Any] = []  # groups of this process


class Control(RankGroup):
    """The group of all processes of a pipeline, which construct it together: its waits can be ended, with a reason.

    Work that fails on any rank is Everywhere on all, and a broken connection is a TransportError. All but `abort` is
    collective.

    Args:
        timeout: Of each wait, in seconds.
    """

    def __init__(self, timeout: float) -> None:
        self.timeout = timedelta(seconds=timeout)
        self.reason = ""
        self._ends: list[Callable[[], None]] = []
        self._naming = _NamingErrors(self)
        self.groups: list[Any] = []  # of this process, with those of others that stand on this one
        with GroupConnections.watch() as self._connections:
            with self.naming_errors():
                group: Any = dist.new_group(backend="gloo", timeout=self.timeout)
            super().__init__(group)
            try:
                # Connections are made by the first use of a group; they are then known here.
                self.barrier()
            except TransportError:
                dist.destroy_process_group(group)  # others wait for this process, and now hear of it
                raise
        self._connections.settle(self.gather)
        self.groups.append(group)
        _end_retired()

    @property
    def address(self) -> str | None:
        """Return the address of this process, as others reach it; None if there are no others, or it cannot be seen."""
        return self._connections.address()

    def name_failures(self, wrong: Sequence[str], mine: Exception | None) -> Exception:
        """Return the error of all ranks where work failed on some: the same on each."""
        return Everywhere(join_failures(wrong))

    def broadcast_tensor(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """Return on all ranks what the rank `source` has; the others give a tensor of the same shape."""
        sent = tensor.detach().to("cpu", copy=True).contiguous()
        with self.naming_errors():
            dist.broadcast(sent.view(-1).view(torch.uint8), src=source, group=self.group)
        return sent

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
        self._connections.shut()
        for end in self._ends:
            end()

    def naming_errors(self) -> contextlib.AbstractContextManager[None]:
        """Make the errors of torch.distributed within TransportError, with the reason if it is known."""
        return self._naming


class _NamingErrors:
    """See `Control.naming_errors`. One for all: each message and each wait needs it, a hundred times a step."""

    __slots__ = ("_control",)

    def __init__(self, control: Control) -> None:
        self._control = control

    def __enter__(self) -> None:
        if self._control.reason:
            raise TransportError(self._control.reason)

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if isinstance(error, RuntimeError):
            raise TransportError(self._control.reason or str(error).splitlines()[0]) from error


def _end_retired() -> None:
    if not _retired:
        return
    while _retired:
        # It may be gone already, with the group of all.
        with contextlib.suppress(RuntimeError, ValueError, AssertionError):
            dist.destroy_process_group(_retired.pop())
    # A pipeline and its engine know each other; their connections end with them.
    gc.collect()
