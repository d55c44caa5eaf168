"""Ranks as threads of one process, for tests and benchmarks.

One thread runs at a time and hands over where it has to wait, so that a run is the same each time, torch's global state
belongs to whoever runs, and a deadlock is known at once. With a seed, who runs next and where it is interrupted is
drawn: each seed is another interleaving.
"""

from __future__ import annotations

import random
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from everstep.pipeline.transport.base import Spec, Tag, TransportError

T = TypeVar("T")
Group = tuple[int, ...]


class Deadlock(TransportError):
    """Every rank waits for another; the message says for what."""


@dataclass(eq=False)
class _Offer:
    """One end of a message that waits for the other."""

    tag: Tag
    tensor: torch.Tensor | None = None  # of a send: what is sent; of a receive: what has come
    like: Spec | None = None
    met: bool = False


@dataclass
class _Round:
    """One reduction: what came from whom."""

    tensors: dict[int, torch.Tensor] = field(default_factory=dict)
    done: bool = False


@dataclass
class _Trade:
    """One exchange: of each member, what it has for which other one that has not taken it."""

    given: dict[int, dict[int, torch.Tensor]] = field(default_factory=dict)


class Fabric:
    """A fabric that connects `replicas` pipelines of `ranks` ranks each.

    `blocking`: a send stands still until its receive is posted, the strictest reading of rendezvous semantics; without,
    only waiting for it does.
    """

    def __init__(self, ranks: int, replicas: int = 1, *, blocking: bool = False, seed: int | None = None) -> None:
        self.ranks, self.replicas, self.blocking = ranks, replicas, blocking
        self.world = ranks * replicas
        self.draw = random.Random(seed) if seed is not None else None
        self.sends: dict[tuple[int, int], deque[_Offer]] = defaultdict(deque)
        self.receives: dict[tuple[int, int], deque[_Offer]] = defaultdict(deque)
        self.told: dict[tuple[int, int], deque[bytes]] = defaultdict(deque)
        self.rounds: dict[Group, list[_Round]] = defaultdict(list)
        self.exchanges: dict[Group, list[_Trade]] = defaultdict(list)
        self.calls: dict[tuple[tuple[int | str, ...], int], int] = defaultdict(int)
        self._turns = [threading.Semaphore(0) for _ in range(self.world)]
        self._waiting: dict[int, tuple[Callable[[], bool], str]] = {}
        self._alive: set[int] = set()
        self._failure: TransportError | None = None
        self._errors: dict[int, BaseException] = {}

    def run(self, work: Callable[[InProcess], T]) -> list[T]:
        """Run `work` on each rank, and return the results in the order of replicas, then ranks.

        Raises the first error of any rank, or Deadlock if all that have not ended wait for each other.
        """
        results: dict[int, T] = {}
        threads = torch.get_num_threads()

        def rank(me: int) -> None:
            self._turns[me].acquire()
            torch.set_num_threads(threads)  # a thread begins with as many as there are cores
            try:
                self._check()
                results[me] = work(InProcess(self, me))
            except BaseException as error:
                self._errors[me] = error
                self.fail(TransportError(f"rank {me} failed: {error}"))
            finally:
                self._alive.discard(me)
                self._waiting.pop(me, None)
                self._pass_on(me)

        self._alive = set(range(self.world))
        runners = [threading.Thread(target=rank, args=(me,), name=f"rank {me}", daemon=True) for me in self._alive]
        for runner in runners:
            runner.start()
        self._turns[0].release()
        for runner in runners:
            runner.join()
        if self._errors:
            # In the order in which they failed; who only heard of another's failure says less.
            raise min(self._errors.values(), key=lambda error: isinstance(error, TransportError))
        return [results[me] for me in range(self.world)]

    def until(self, me: int, ready: Callable[[], bool], what: str) -> None:
        """Let others run until `ready()`; `what` names it in a deadlock."""
        self._check()
        if ready() and self.draw is None:
            return
        self._waiting[me] = (ready, what)
        self._pass_on(me)
        self._turns[me].acquire()
        self._check()
        del self._waiting[me]

    def fail(self, failure: TransportError) -> None:
        """Every rank that waits, or comes to the transport, raises this."""
        if self._failure is None:
            self._failure = failure
            for turn in self._turns:
                turn.release()

    def match(self, pair: tuple[int, int]) -> None:
        """Let the first send of a directed pair meet its first receive, as long as there are both."""
        sends, receives = self.sends[pair], self.receives[pair]
        while sends and receives:
            sent, taken = sends.popleft(), receives.popleft()
            assert sent.tensor is not None
            assert taken.like is not None
            if sent.tag != taken.tag:
                raise TransportError(f"rank {pair[0]} sends {sent.tag}, but rank {pair[1]} expects {taken.tag}")
            found = (tuple(sent.tensor.shape), sent.tensor.dtype)
            if found != taken.like[:2]:
                raise TransportError(f"rank {pair[0]} sends {sent.tag} as {found}, rank {pair[1]} expects {taken.like}")
            taken.tensor = sent.tensor.clone()
            sent.met = taken.met = True

    def _check(self) -> None:
        if self._failure is not None:
            raise type(self._failure)(str(self._failure))

    def _pass_on(self, me: int) -> None:
        if self._failure is not None or not self._alive:
            return
        able = [rank for rank in sorted(self._alive) if rank not in self._waiting or self._waiting[rank][0]()]
        if not able:
            waits = "; ".join(f"rank {rank} {what}" for rank, (_, what) in sorted(self._waiting.items()))
            self.fail(Deadlock(f"every rank waits for another: {waits}"))
        elif self.draw is not None:
            self._turns[self.draw.choice(able)].release()
        else:
            self._turns[min(able, key=lambda rank: (rank - me - 1) % self.world)].release()


@dataclass
class _InProcessSend:
    fabric: Fabric
    me: int
    offer: _Offer
    what: str

    def wait(self) -> None:
        self.fabric.until(self.me, lambda: self.offer.met, self.what)


@dataclass
class _InProcessReceive:
    fabric: Fabric
    me: int
    offer: _Offer
    what: str

    def wait(self) -> torch.Tensor:
        self.fabric.until(self.me, lambda: self.offer.met, self.what)
        tensor, self.offer.tensor = self.offer.tensor, None
        assert tensor is not None, "waited for twice"
        return tensor


@dataclass
class _InProcessReduction:
    fabric: Fabric
    me: int
    round: _Round
    what: str

    def wait(self) -> None:
        self.fabric.until(self.me, lambda: self.round.done, self.what)


@dataclass
class _Exchanging:
    fabric: Fabric
    me: int
    trade: _Trade
    group: Group
    sizes: tuple[int, ...]

    def done(self) -> bool:
        return len(self.trade.given) == len(self.group)

    def wait(self) -> list[torch.Tensor]:
        self.fabric.until(self.me, self.done, f"exchanges with {self.group}")
        mine = self.group.index(self.me)
        found = [self.trade.given[member].pop(mine) for member in self.group]
        if (came := tuple(part.numel() for part in found)) != self.sizes:
            raise TransportError(f"rank {self.me} expects {self.sizes} numbers of {self.group}, which have {came}")
        return found


class InProcess:
    """A rank of a fabric: a Transport."""

    def __init__(self, fabric: Fabric, world_rank: int) -> None:
        self.fabric, self._me = fabric, world_rank
        self.replica, self.rank = divmod(world_rank, fabric.ranks)
        self.size, self.replicas = fabric.ranks, fabric.replicas
        self.device = torch.device("cpu")

    def send(self, tensor: torch.Tensor, to: int, tag: Tag) -> _InProcessSend:
        pair = (self._me, self._world(to))
        offer = _Offer(tag, tensor=tensor)
        self.fabric.sends[pair].append(offer)
        self.fabric.match(pair)
        sent = _InProcessSend(self.fabric, self._me, offer, f"sends {tag} to rank {to}")
        if self.fabric.blocking or (self.fabric.draw is not None and self.fabric.draw.random() < 0.3):
            self.fabric.until(self._me, lambda: offer.met or not self.fabric.blocking, sent.what)
        return sent

    def receive(self, like: Spec, from_: int, tag: Tag) -> _InProcessReceive:
        pair = (self._world(from_), self._me)
        offer = _Offer(tag, like=like)
        self.fabric.receives[pair].append(offer)
        self.fabric.match(pair)
        return _InProcessReceive(self.fabric, self._me, offer, f"waits for {tag} from rank {from_}")

    def tell(self, message: bytes, to: int) -> None:
        self.fabric.told[self._me, self._world(to)].append(message)

    def hear(self, from_: int) -> bytes:
        told = self.fabric.told[self._world(from_), self._me]
        self.fabric.until(self._me, lambda: bool(told), f"waits for a word of rank {from_}")
        return told.popleft()

    def alike(self, message: bytes) -> list[bytes]:
        if self.replicas == 1:
            return [message]
        message, slots = message[:508], torch.zeros(self.replicas, 512, dtype=torch.uint8, device="cpu")
        slots[self.replica, : len(message) + 1] = torch.tensor([*message, 255], dtype=torch.uint8, device="cpu")
        self.all_reduce(slots, self.group([self.rank], replicas=True)).wait()
        return [bytes(row.tolist()).rstrip(b"\0")[:-1] for row in slots]

    def group(self, ranks: Sequence[int], *, replicas: bool) -> Group:
        pipelines = range(self.replicas) if replicas else (self.replica,)
        return tuple(replica * self.size + rank for replica in pipelines for rank in sorted(set(ranks)))

    def all_reduce(self, tensor: torch.Tensor, group: Group) -> _InProcessReduction:
        if self._me not in group:
            raise TransportError(f"rank {self._me} is not in the group {group}")
        rounds, call = self.fabric.rounds[group], self.fabric.calls[group, self._me]
        self.fabric.calls[group, self._me] += 1
        if call == len(rounds):
            rounds.append(_Round())
        meeting = rounds[call]
        meeting.tensors[self._me] = tensor
        if len(meeting.tensors) == len(group):
            self._sum(meeting, group)
        return _InProcessReduction(self.fabric, self._me, meeting, f"reduces over {group}")

    def exchange(self, parts: Sequence[torch.Tensor], sizes: Sequence[int], group: Group) -> _Exchanging:
        rounds, call = self.fabric.exchanges[group], self.fabric.calls[("exchange", *group), self._me]
        self.fabric.calls[("exchange", *group), self._me] += 1
        if call == len(rounds):
            rounds.append(_Trade())
        rounds[call].given[self._me] = {place: part.clone() for place, part in enumerate(parts)}
        return _Exchanging(self.fabric, self._me, rounds[call], group, tuple(sizes))

    def connect(self, links: Sequence[tuple[int, int]]) -> None:
        pass

    def settle(self) -> None:
        pass

    def abort(self, reason: str) -> None:
        self.fabric.fail(TransportError(reason))

    def _sum(self, meeting: _Round, group: Group) -> None:
        parts = [meeting.tensors[member] for member in group]
        if len({(part.shape, part.dtype) for part in parts}) > 1:
            raise TransportError(f"the ranks {group} reduce different things: {[tuple(part.shape) for part in parts]}")
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        for part in parts:
            part.copy_(total)
        meeting.tensors.clear()
        meeting.done = True

    def _world(self, rank: int) -> int:
        return self.replica * self.size + rank
