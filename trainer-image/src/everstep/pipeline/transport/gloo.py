"""Ranks as processes, over torch.distributed: gloo between processors, NCCL between GPUs.

Several ranks on one GPU, which NCCL refuses, use gloo: what is sent is staged in the memory of the host. Small messages
always go by gloo. With NCCL each directed pair of ranks between which the schedule sends something has a group of its
own, since the messages of one group wait for each other in the order in which they were posted. All pairs would be too
many: each group is made by all processes together, one after the other.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from everstep.pipeline.transport.base import Spec, Tag, TransportError
from everstep.pipeline.transport.control import Control
from everstep.pipeline.transport.devices import with_index
from everstep.pipeline.transport.grid import Grid
from everstep.pipeline.transport.group_connections import GroupConnections

_FRAME = 512  # bytes of a small message; a longer one is followed by the rest
_WORDS, _TENSORS = 1, 2  # tags of gloo: what is beside the tensors has an order of its own


class ProcessGroups:
    """A Transport over groups of its own, with the ranks of `grid`; all processes construct it together, after
    `torch.distributed.init_process_group`.

    `device`: of this rank's tensors. `nccl`: tensors go by NCCL; each rank then needs a GPU of its own. `timeout`:
    seconds after which a message that does not come is an error; who is to blame, heartbeats know sooner. `control`:
    if there is one already, then its timeout counts.
    """

    def __init__(
        self,
        grid: Grid,
        device: torch.device | None = None,
        *,
        nccl: bool = False,
        timeout: float = 1800.0,
        control: Control | None = None,
    ) -> None:
        self.grid, self.device = grid, with_index(device or "cpu")
        self.replica, self.rank = grid.find(dist.get_rank())
        self.size, self.replicas = grid.ranks, grid.replicas
        self._nccl = nccl
        self._staged = self.device.type != "cpu" and not nccl
        self._made: set[tuple[str, tuple[int, ...]]] = set()
        self._groups: dict[tuple[str, tuple[int, ...]], Any] = {}  # those that this process is in
        self._links: set[tuple[int, int]] = set()  # those that have groups, with NCCL
        self._pairs: dict[tuple[int, int], Any] = {}  # this process's groups among them
        self._told: list[tuple[Any, Any]] = []
        self._meet = control or Control(timeout)
        self._control = self._meet.group
        with GroupConnections.watch() as self._connections:
            self._meet.barrier()
        self._connections.settle(self._meet.gather)
        self._meet.on_abort(self._end)
        self._alike = self._column() if self.replicas > 1 else None

    def connect(self, links: Sequence[tuple[int, int]]) -> None:
        """See Transport. All processes take part in the making of each group, whoever is in it."""
        fresh = [link for link in links if link not in self._links]
        if not self._nccl or not fresh:
            return
        with self._connections.watch_more():
            self._meet.barrier()
            for pipeline in self.grid.processes:
                for one, other in fresh:
                    pair = sorted((pipeline[one], pipeline[other]))
                    group = dist.new_group(pair, backend="nccl", timeout=self._meet.timeout)
                    if dist.get_rank() in pair:
                        self._pairs[one, other] = group
                        self._meet.groups.append(group)
        self._links.update(fresh)
        self._connections.settle(self._meet.gather)

    def send(self, tensor: torch.Tensor, to: int, tag: Tag) -> _GlooSend:
        """See Transport."""
        process = self._process(to)
        with self._explained():
            if self._nccl:
                return _GlooSend(self, dist.isend(tensor, process, group=self._link(self.rank, to)), tensor)
            sent = tensor.cpu() if self._staged else tensor
            return _GlooSend(self, dist.isend(sent, process, group=self._control, tag=_TENSORS), sent)

    def receive(self, like: Spec, from_: int, tag: Tag) -> _GlooReceive:
        """See Transport."""
        process = self._process(from_)
        place = torch.empty(like.shape, dtype=like.dtype, device="cpu" if self._staged else self.device)
        with self._explained():
            if self._nccl:
                return _GlooReceive(self, dist.irecv(place, process, group=self._link(from_, self.rank)), place)
            return _GlooReceive(self, dist.irecv(place, process, group=self._control, tag=_TENSORS), place)

    def tell(self, message: bytes, to: int) -> None:
        """See Transport."""
        framed = struct.pack("<I", len(message)) + message
        frame, rest = framed[:_FRAME].ljust(_FRAME, b"\0"), framed[_FRAME:]
        with self._explained():
            for part in (frame, rest):
                if part:
                    tensor = torch.frombuffer(bytearray(part), dtype=torch.uint8)
                    work = dist.isend(tensor, self._process(to), group=self._control, tag=_WORDS)
                    self._told.append((work, tensor))

    def hear(self, from_: int) -> bytes:
        """See Transport."""
        frame = self._hear(_FRAME, from_)
        (length,) = struct.unpack("<I", frame[:4])
        more = length + 4 - _FRAME
        return (frame[4:] + (self._hear(more, from_) if more > 0 else b""))[:length]

    def group(self, ranks: Sequence[int], *, replicas: bool) -> Any:
        """See Transport."""
        columns = [[pipeline[rank] for rank in sorted(set(ranks))] for pipeline in self.grid.processes]
        with self._connections.watch_more():
            if replicas:
                found = self._group([process for column in columns for process in column])
            else:
                found = [self._group(column) for column in columns][self.replica]
        self._connections.settle(self._meet.gather)
        return found

    def alike(self, message: bytes) -> list[bytes]:
        """See Transport."""
        if self._alike is None:
            return [message]
        framed = struct.pack("<I", len(message[: _FRAME - 4])) + message[: _FRAME - 4]
        own = torch.frombuffer(bytearray(framed.ljust(_FRAME, b"\0")), dtype=torch.uint8)
        every = [torch.empty_like(own) for _ in range(self.replicas)]
        with self._explained():
            dist.all_gather(every, own, group=self._alike)
        found = [each.numpy().tobytes() for each in every]
        return [each[4 : 4 + struct.unpack("<I", each[:4])[0]] for each in found]

    def all_reduce(self, tensor: torch.Tensor, group: Any) -> _GlooReduction:
        """See Transport."""
        with self._explained():
            sent = tensor.cpu() if self._staged else tensor
            return _GlooReduction(self, dist.all_reduce(sent, group=group, async_op=True), sent, tensor)

    def exchange(self, parts: Sequence[torch.Tensor], sizes: Sequence[int], group: Any) -> _Exchanging:
        """See Transport. In bytes, of which gloo knows no less than NCCL; its `reduce_scatter` is an all-reduce."""
        sent = torch.cat(list(parts))
        if self._staged:
            sent = sent.cpu()
        came = sent.new_empty(sum(sizes))
        width = sent.element_size()
        with self._explained():
            work = dist.all_to_all_single(
                came.view(torch.uint8),
                sent.view(torch.uint8),
                [size * width for size in sizes],
                [part.numel() * width for part in parts],
                group=group,
                async_op=True,
            )
        return _Exchanging(self, work, sent, came, tuple(sizes))

    def settle(self) -> None:
        """See Transport."""
        with self._explained():
            for work, _ in self._told:
                work.wait()
        self._told.clear()

    def abort(self, reason: str) -> None:
        """See Transport. What waits in gloo is woken by its connections, which are shut; NCCL can abort its groups."""
        self._meet.abort(reason)

    def _end(self) -> None:
        self._connections.shut()
        nccl = [group for (backend, _), group in self._groups.items() if backend == "nccl"]
        for group in (*nccl, *self._pairs.values()):
            with contextlib.suppress(RuntimeError):
                group.abort()

    def _hear(self, size: int, from_: int) -> bytes:
        tensor = torch.empty(size, dtype=torch.uint8, device="cpu")
        with self._explained():
            dist.recv(tensor, self._process(from_), group=self._control, tag=_WORDS)
        return bytes(tensor.numpy().tobytes())

    def _column(self) -> Any:
        """Return the group in which the replicas of this rank exchange small messages; it uses gloo in any case."""
        columns = [[pipeline[rank] for pipeline in self.grid.processes] for rank in range(self.size)]
        with self._connections.watch_more():
            found = [self._group(column, "gloo") for column in columns][self.rank]
        self._connections.settle(self._meet.gather)
        return found

    def _group(self, processes: list[int], backend: str = "") -> Any:
        """Return the group of these processes; None for a process that is not in it."""
        key = backend or ("nccl" if self._nccl else "gloo"), tuple(sorted(processes))
        if key in self._made:
            return self._groups.get(key)
        self._made.add(key)
        self._meet.barrier()
        group: Any = dist.new_group(list(key[1]), backend=key[0], timeout=self._meet.timeout)
        if dist.get_rank() not in key[1]:
            return None
        self._groups[key] = group
        self._meet.groups.append(group)
        with self._explained():
            dist.barrier(group=group)
        return group

    def _link(self, source: int, target: int) -> Any:
        if (source, target) not in self._pairs:
            made = ", ".join(f"{one} to {other}" for one, other in sorted(self._pairs)) or "none"
            raise TransportError(f"no link from rank {source} to rank {target} was made: connect() made {made}")
        return self._pairs[source, target]

    def _process(self, rank: int) -> int:
        return self.grid.processes[self.replica][rank]

    def _explained(self) -> contextlib.AbstractContextManager[None]:
        return self._meet.naming_errors()


@dataclass
class _GlooSend:
    transport: ProcessGroups
    work: Any
    tensor: Any

    def wait(self) -> None:
        with self.transport._explained():
            self.work.wait()


@dataclass
class _GlooReceive:
    transport: ProcessGroups
    work: Any
    place: Any

    def wait(self) -> torch.Tensor:
        with self.transport._explained():
            self.work.wait()
        received: torch.Tensor = self.place.to(self.transport.device)
        return received


@dataclass
class _GlooReduction:
    transport: ProcessGroups
    work: Any
    sent: Any
    into: Any

    def wait(self) -> None:
        with self.transport._explained():
            self.work.wait()
        if self.sent is not self.into:
            self.into.copy_(self.sent)


@dataclass
class _Exchanging:
    transport: ProcessGroups
    work: Any
    sent: Any  # must stay until it is done
    came: Any
    sizes: tuple[int, ...]

    def done(self) -> bool:
        with self.transport._explained():
            return bool(self.work.is_completed())

    def wait(self) -> list[torch.Tensor]:
        with self.transport._explained():
            self.work.wait()
        self.sent = None
        return list(self.came.to(self.transport.device).split(self.sizes))
