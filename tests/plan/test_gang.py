"""Gangs: nobody holds forever what somebody older waits for, and everybody finishes."""

from __future__ import annotations

import dataclasses
import random

from hypothesis import given
from hypothesis import strategies as st

from everstep_operator.plan import gang
from everstep_operator.plan.observation import GangView

POOL = frozenset({"a100"})


def view(name: str, created: float, *, wanted: int = 4, scheduled: int = 0, **fields: object) -> GangView:
    base = GangView(key=f"default/{name}", uid=name, created=created, pools=POOL, wanted=wanted, scheduled=scheduled)
    return dataclasses.replace(base, **fields)  # type: ignore[arg-type]


def hold(
    me: GangView, *others: GangView, grew_at: float = 0, scale_up_at: float | None = None, now: float = 1000
) -> bool:
    return gang.judge_hold(me, others, grew_at=grew_at, scale_up_at=scale_up_at, now=now).release


def test_the_oldest_never_yields_to_a_younger() -> None:
    assert not hold(view("old", 0, scheduled=2), view("young", 1, scheduled=2), now=1e9)


def test_one_that_todays_nodes_cannot_hold_gives_way_once_it_has_stalled() -> None:
    impossible, young = view("old", 0, wanted=64, scheduled=12, places=12), view("young", 1, places=4)
    assert not hold(impossible, young, grew_at=990)
    assert hold(impossible, young, grew_at=990, now=990 + gang.STALL_SECONDS)
    assert not hold(impossible, young, scale_up_at=990), "nodes are on their way"
    gone = dataclasses.replace(impossible, scheduled=0, released_at=1000)
    assert gang.judge_retry(gone, [young], now=1001).retry_at == 1000 + gang.BACKOFF_SECONDS + gang._compute_jitter(
        "old"
    )


def test_one_that_todays_nodes_can_hold_never_gives_way_to_one_that_they_cannot() -> None:
    impossible, young = view("old", 0, wanted=64, scheduled=2, places=12), view("young", 1, scheduled=2, places=4)
    assert not hold(young, impossible, now=1e9)


def test_the_oldest_looks_again_for_nodes_may_go_without_an_event() -> None:
    verdict = gang.judge_hold(view("a", 0, scheduled=2), [view("b", 1)], grew_at=0, scale_up_at=None, now=1000)
    assert verdict == gang.GangVerdict(retry_at=1000 + gang.RECHECK_SECONDS)


def test_a_younger_gang_yields_once_it_has_stalled() -> None:
    young, old = view("young", 1, scheduled=2), view("old", 0, scheduled=2)
    assert not hold(young, old, grew_at=990)
    assert hold(young, old, grew_at=990, now=990 + gang.STALL_SECONDS)


def test_it_is_told_when_to_look_again() -> None:
    verdict = gang.judge_hold(view("b", 1, scheduled=1), [view("a", 0)], grew_at=990, scale_up_at=None, now=1000)
    assert verdict == gang.GangVerdict(retry_at=990 + gang.STALL_SECONDS)


def test_the_youngest_holder_releases_first() -> None:
    old, middle, young = (
        view("old", 0, wanted=1),
        view("middle", 1, wanted=2, scheduled=1),
        view("young", 2, scheduled=3),
    )
    assert hold(young, old, middle)
    assert not hold(middle, old, young), "what the younger one gives back may be what it lacks"


def test_who_would_not_fit_anyway_does_not_wait_for_the_younger() -> None:
    old, middle, young = view("old", 0, scheduled=1), view("middle", 1, scheduled=1), view("young", 2, scheduled=1)
    assert hold(middle, old, young)


def test_room_in_sight_buys_time() -> None:
    young, old = view("young", 1, scheduled=2), view("old", 0, scheduled=2)
    assert not hold(young, old, scale_up_at=900)
    assert hold(young, old, scale_up_at=900, now=900 + gang.SCALE_UP_SECONDS)


def test_survivors_of_a_running_job_wait_longer() -> None:
    young, old = view("young", 1, scheduled=3, recovering=True), view("old", 0, scheduled=2)
    assert not hold(young, old, grew_at=900)
    assert hold(young, old, grew_at=900, now=900 + gang.STALL_SECONDS_RECOVERING)


def test_another_pool_is_another_queue() -> None:
    young, elsewhere = view("young", 1, scheduled=2), view("old", 0, scheduled=2, pools=frozenset({"h100"}))
    assert not hold(young, elsewhere, grew_at=900)
    assert hold(young, dataclasses.replace(elsewhere, pools=frozenset()), grew_at=900), "no pool: the whole cluster"


def test_nobody_gives_way_to_one_that_a_queue_keeps_from_the_scheduler() -> None:
    """It may be kept for days, and wants no node before."""
    queued, young = view("old", 0, gated=True), view("young", 1, scheduled=2)
    assert not hold(young, queued, grew_at=900)
    assert gang.judge_retry(view("young", 1, released_at=900), [queued], now=1000) == gang.GangVerdict()
    assert hold(young, dataclasses.replace(queued, scheduled=1), grew_at=900), "it holds a node"
    assert hold(dataclasses.replace(young, gated=True), queued, grew_at=900), "what it holds, the older is queued for"


def test_the_oldest_holds_nothing_for_ever_of_which_a_queue_keeps_pods() -> None:
    """A quota of Kueue that it exceeds has room for three of its four pods, and meanwhile for nobody else's."""
    me, queued = view("me", 0, scheduled=3, gated=True), view("b", 1, wanted=1, gated=True)
    for recovering in (False, True):
        me = dataclasses.replace(me, recovering=recovering)
        assert not hold(me, queued, now=gang.STALL_SECONDS_ALONE - 1)
        assert hold(me, queued, now=gang.STALL_SECONDS_ALONE)


def test_alone_it_gives_back_late() -> None:
    assert not hold(view("me", 0, scheduled=2), now=gang.STALL_SECONDS_ALONE - 1)
    assert hold(view("me", 0, scheduled=2), now=gang.STALL_SECONDS_ALONE)


def test_after_giving_back_it_waits_for_the_older_or_a_backoff() -> None:
    me, old = view("me", 1, released_at=1000), view("old", 0, scheduled=2)
    assert gang.judge_retry(me, [old], now=1001).retry_at is not None
    assert (
        gang.judge_retry(me, [dataclasses.replace(old, scheduled=4)], now=1000 + gang.BACKOFF_SECONDS_ALONE).retry_at
        is None
    )
    assert gang.judge_retry(me, [old], now=1000 + gang.BACKOFF_SECONDS + gang.BACKOFF_JITTER_SECONDS).retry_at is None


_gangs = st.builds(
    view,
    name=st.sampled_from("abcdefgh"),
    created=st.integers(0, 3),
    wanted=st.integers(1, 6),
    scheduled=st.integers(0, 6),
    released_at=st.none() | st.integers(0, 2000),
    recovering=st.booleans(),
    places=st.none() | st.integers(0, 6),
    blocked=st.booleans(),
    quota=st.sampled_from(["", "default"]),
    gated=st.booleans(),
)


@given(me=_gangs, others=st.lists(_gangs, max_size=5), now=st.integers(0, 3000), grew_at=st.integers(0, 1000))
def test_whom_others_need_not_wake_decides_the_same_whoever_they_are(
    me: GangView, others: list[GangView], now: float, grew_at: float
) -> None:
    def decide(rivals: list[GangView]) -> tuple[gang.GangVerdict, gang.GangVerdict]:
        held = gang.judge_hold(me, rivals, grew_at=grew_at, scale_up_at=None, now=now)
        return held, gang.judge_retry(me, rivals, now=now)

    assert gang.heeds_rivals(me) or decide(others) == decide([])


@dataclasses.dataclass
class SimulatedGang:
    name: str
    created: float
    wanted: int
    runs_for: float
    tried: bool = False
    bound: int = 0
    grew_at: float = 0.0
    released_at: float | None = None
    formed_at: float | None = None
    finished: bool = False

    def view(self, capacity: int) -> GangView:
        """Return the job as others see it while there are `capacity` nodes."""
        return view(
            self.name,
            self.created,
            wanted=self.wanted,
            scheduled=self.bound,
            released_at=self.released_at,
            places=min(capacity, self.wanted),
        )


class Simulation:
    """One pool of `capacity` pods, a scheduler that binds pending pods in random order, gangs that obey the policy."""

    def __init__(self, capacity: int, gangs: list[SimulatedGang], rng: random.Random) -> None:
        self.capacity, self.gangs, self.rng, self.now = capacity, gangs, rng, 0.0

    def step(self, seconds: float) -> None:
        self.now += seconds
        for g in self.gangs:
            if g.formed_at is not None and not g.finished and self.now >= g.formed_at + g.runs_for:
                g.finished, g.bound = True, 0
        pending = [g for g in self.gangs if g.tried and not g.finished for _ in range(g.wanted - g.bound)]
        self.rng.shuffle(pending)
        room = self.capacity - sum(g.bound for g in self.gangs)
        assert room >= 0
        for g in pending[:room]:
            g.bound, g.grew_at = g.bound + 1, self.now
            if g.bound == g.wanted and g.formed_at is None:
                g.formed_at = self.now
        order = [g for g in self.gangs if g.formed_at is None and g.created <= self.now]
        self.rng.shuffle(order)  # reconciles of several jobs run in any order
        for g in order:
            self.reconcile(g)

    def reconcile(self, g: SimulatedGang) -> None:
        waiting = [o for o in self.gangs if o is not g and o.formed_at is None and o.created <= self.now]
        me, others = g.view(self.capacity), [o.view(self.capacity) for o in waiting]
        if not g.tried:
            g.tried = gang.judge_retry(me, others, now=self.now).retry_at is None
            g.grew_at = self.now
            return
        if gang.judge_hold(me, others, grew_at=g.grew_at, scale_up_at=None, now=self.now).release:
            possible = [o for o in waiting if o.wanted <= self.capacity]
            overtaken = g.wanted <= self.capacity and others and all(o.created > g.created for o in possible)
            assert not overtaken, "the oldest that is possible yielded"
            g.tried, g.bound, g.released_at = False, 0, self.now


@given(data=st.data(), capacity=st.integers(2, 20), seed=st.integers(0, 2**32))
def test_every_gang_that_fits_finishes(data: st.DataObject, capacity: int, seed: int) -> None:
    sizes = data.draw(st.lists(st.integers(1, capacity), min_size=2, max_size=12))
    gangs = [SimulatedGang(f"g{i:02}", float(i // 3), size, runs_for=100.0) for i, size in enumerate(sizes)]
    simulation = Simulation(capacity, gangs, random.Random(seed))
    # Each gang can cost those before it one stall and one back-off at most; far below this bound, or it is a livelock.
    while not all(g.finished for g in gangs):
        simulation.step(5.0)
        assert simulation.now < len(gangs) * 1000, [(g.name, g.bound, g.wanted) for g in gangs if not g.finished]


@given(data=st.data(), capacity=st.integers(1, 20), more=st.integers(0, 20), seed=st.integers(0, 2**32))
def test_no_gang_that_fits_waits_for_one_that_does_not(
    data: st.DataObject, capacity: int, more: int, seed: int
) -> None:
    """Pools that shrink and grow, gangs that are too large, arrivals and ends at any time."""
    one = st.tuples(st.integers(1, capacity + more), st.integers(0, 2000), st.integers(1, 400))
    drawn = data.draw(st.lists(one, min_size=2, max_size=12))
    gangs = [SimulatedGang(f"g{i:02}", float(at), size, float(end)) for i, (size, at, end) in enumerate(drawn)]
    simulation = Simulation(capacity, gangs, random.Random(seed))
    lost = data.draw(st.integers(0, capacity - 1))
    while simulation.now < 600:  # with fewer nodes than there will be: any gang may be impossible for a while
        used = sum(g.bound for g in gangs)
        simulation.capacity = max(used, capacity - lost)
        simulation.step(5.0)
    simulation.capacity = capacity
    possible = [g for g in gangs if g.wanted <= capacity]
    while not all(g.finished for g in possible):
        simulation.step(5.0)
        assert simulation.now < 3000 + len(gangs) * 1500, [(g.name, g.bound, g.wanted) for g in gangs if not g.finished]
    simulation.capacity = capacity + more
    end = simulation.now + 2000 + len(gangs) * 1500
    while not all(g.finished for g in gangs):
        simulation.step(5.0)
        assert simulation.now < end, "what was impossible is not lost: it runs once there are nodes for it"


def test_three_gangs_behind_one_that_no_nodes_can_hold_all_run_within_minutes() -> None:
    impossible = SimulatedGang("impossible", 0.0, 64, runs_for=1e9)
    gangs = [SimulatedGang(f"g{i}", 1.0 + i, 4, runs_for=1e9) for i in range(3)]
    simulation = Simulation(12, [impossible, *gangs], random.Random(7))
    simulation.step(0.5)
    assert impossible.bound == 0
    simulation.step(0.1)
    assert impossible.bound == 12, "it came first"
    while simulation.now < 120:
        simulation.step(5.0)
    assert [g.formed_at is not None for g in gangs] == [True] * 3


@given(seed=st.integers(0, 2**32))
def test_jobs_that_each_need_everything_finish_in_order(seed: int) -> None:
    gangs = [SimulatedGang(f"g{i}", float(i), 8, runs_for=50.0) for i in range(6)]
    simulation = Simulation(8, gangs, random.Random(seed))
    # Submitted while something else has the nodes, so that all wait together when they become free.
    blocker = SimulatedGang("blocker", -1.0, 8, runs_for=300.0, tried=True)
    simulation.gangs.insert(0, blocker)
    while not all(g.finished for g in gangs):
        simulation.step(5.0)
        assert simulation.now < 10_000
    formed = [g.formed_at for g in gangs if g.formed_at is not None]
    assert formed == sorted(formed)


def test_a_hundred_stalled_jobs_give_back_together() -> None:
    gangs = [SimulatedGang(f"g{i:03}", float(i) / 100, 10, runs_for=100.0) for i in range(100)]
    simulation = Simulation(200, gangs, random.Random(7))
    while simulation.now < 120:
        simulation.step(5.0)
    assert sum(g.formed_at is not None for g in gangs) >= 10, "half of the room is at work two minutes later"
