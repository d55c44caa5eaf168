"""Waiting jobs are looked at only when something wakes them, and all of them finish all the same."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from everstep_operator.cluster.cache import Key
from everstep_operator.cluster.waiting_gangs import WaitingGangs
from everstep_operator.plan import gang
from everstep_operator.plan.observation import GangView

POOL = frozenset({"a100"})
RUN_SECONDS = 100.0


@dataclass
class QueuedJob:
    key: Key
    created: float
    wanted: int
    has_pods: bool = False
    bound: int = 0
    grew_at: float = 0.0
    released_at: float | None = None
    ends_at: float | None = None
    finished: bool = False
    rivals: tuple[GangView, ...] | None = None  # what a look that goes on has seen of the others
    look_at: float | None = None  # its timer

    def view(self, capacity: int) -> GangView | None:
        if self.finished or self.bound == self.wanted:
            return None
        return GangView(
            "/".join(self.key), self.key[1], self.created, POOL, wanted=self.wanted, scheduled=self.bound,
            released_at=self.released_at, places=min(capacity, self.wanted),
        )  # fmt: skip


@dataclass
class Cluster:
    """One pool, a scheduler that binds one pending pod after the other, and looks that take time."""

    capacity: int
    jobs: dict[Key, QueuedJob]
    rng: random.Random
    now: float = 0.0
    woken: set[Key] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.gangs = WaitingGangs(self.woken.add)
        self.woken.update(self.jobs)

    def run_until_quiet(self) -> None:
        """Bind pods, begin looks and end them, in any order, until nothing is left to do at this moment."""
        while True:
            looking = [each for each in self.jobs.values() if each.rivals is not None]
            idle = [self.jobs[key] for key in sorted(self.woken) if self.jobs[key].rivals is None]
            pending = [each for each in self.jobs.values() if each.has_pods and each.bound < each.wanted]
            room = self.capacity > sum(each.bound for each in self.jobs.values())
            steps = [*((self.begin_look, each) for each in idle), *((self.end_look, each) for each in looking)]
            steps += [(self.bind, each) for each in pending if room]
            if not steps:
                return
            step, job = self.rng.choice(steps)
            step(job)

    def bind(self, job: QueuedJob) -> None:
        job.bound, job.grew_at = job.bound + 1, self.now
        if job.bound == job.wanted:
            job.ends_at = self.now + RUN_SECONDS
        self.woken.add(job.key)

    def begin_look(self, job: QueuedJob) -> None:
        self.woken.discard(job.key)
        job.rivals, job.look_at = self.gangs.list_views(), None

    def end_look(self, job: QueuedJob) -> None:
        rivals, job.rivals = job.rivals or (), None
        if (view := job.view(self.capacity)) is not None:
            verdict = self.judge(job, view, rivals)
            job.look_at = verdict.retry_at
            if verdict.release:
                job.has_pods, job.bound, job.released_at = False, 0, self.now
                self.woken.add(job.key)  # its pods go
            elif not job.has_pods and verdict.retry_at is None:
                job.has_pods, job.grew_at = True, self.now
        self.gangs.update(job.key, job.view(self.capacity))

    def judge(self, job: QueuedJob, view: GangView, rivals: tuple[GangView, ...]) -> gang.GangVerdict:
        if not job.has_pods:
            return gang.judge_retry(view, rivals, now=self.now)
        return gang.judge_hold(view, rivals, grew_at=job.grew_at, scale_up_at=None, now=self.now)

    def assert_nobody_was_forgotten(self) -> None:
        """Assert that another look at any job would do nothing, and would not set an earlier timer."""
        for job in self.jobs.values():
            if (view := job.view(self.capacity)) is None:
                continue
            verdict = self.judge(job, view, self.gangs.list_views())
            assert not verdict.release, job
            assert job.has_pods or verdict.retry_at is not None, job
            assert verdict.retry_at is None or (job.look_at is not None and job.look_at <= verdict.retry_at), job

    def wait(self) -> None:
        """Go on to the next moment at which a job ends or a timer wakes one."""
        ends = [each.ends_at for each in self.jobs.values() if each.ends_at is not None and not each.finished]
        timers = [each.look_at for each in self.jobs.values() if each.look_at is not None and not each.finished]
        assert ends or timers, "nothing will ever wake those that wait"
        self.now = max(self.now, min([*ends, *timers]))
        for job in self.jobs.values():
            if job.ends_at is not None and not job.finished and job.ends_at <= self.now:
                job.finished, job.bound, job.has_pods = True, 0, False
                self.woken.add(job.key)
            if job.look_at is not None and job.look_at <= self.now:
                self.woken.add(job.key)


@given(data=st.data(), capacity=st.integers(2, 12), seed=st.integers(0, 2**32))
def test_every_job_that_fits_finishes_though_few_are_woken(data: st.DataObject, capacity: int, seed: int) -> None:
    sizes = data.draw(st.lists(st.integers(1, capacity), min_size=2, max_size=10))
    keys = [("default", f"job-{number:02}") for number in range(len(sizes))]
    jobs = {key: QueuedJob(key, float(n // 3), size) for n, (key, size) in enumerate(zip(keys, sizes, strict=True))}
    cluster = Cluster(capacity, jobs, random.Random(seed))
    while True:
        cluster.run_until_quiet()
        cluster.assert_nobody_was_forgotten()
        waiting = [job for job in jobs.values() if not job.finished]
        if not waiting:
            return
        assert cluster.now < len(jobs) * 1000, [(job.key, job.bound, job.wanted) for job in waiting]
        cluster.wait()
