"""`make bench-month`: a simulated month of reclaimed and lost nodes, for the operator's planner and for plain restarts.

The planner is the real one; its cluster is that of the planner's tests, with the delays of a cloud. The other policy is
what a script does that saves to a store every hour and begins again after each disruption. Both meet the same events,
those of `spot_month.csv`: the second, the kind, and the number of the node.
"""

from __future__ import annotations

import csv
import dataclasses
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.measure import Row, report
from everstep_operator.api.reasons import Reason
from everstep_operator.plan.node_signals import NodeSignal
from everstep_operator.plan.node_view import NodeView
from tests.builders import job
from tests.plan.world import World

RESULT = Path("build/bench/month.json")
EVENTS = Path(__file__).with_suffix(".csv")
DAY = 86_400.0
MONTH = 28 * DAY - 3600  # `timeouts.runtime` is at most 28 days, and is not to end the job
SIZES = (8, 16, 32, 64)
LARGEST_LOSS = 0.05  # of the time: goodput is at least 95 %
NOTICE = 120.0
# Means of the written file: of one node, and of the job whatever its size.
RECLAIMED_EVERY, LOST_EVERY, CRASH_EVERY = 4 * DAY, 60 * DAY, 2 * DAY


@dataclass(frozen=True)
class Delays:
    """Seconds that things take. Pods, ranks and restores as measured or slower, nodes as autoscalers bring them."""

    node: float = 150.0  # from a pod without a node to a node that has joined
    pod: float = 15.0  # from a node to a running container, its image there
    restore: float = 20.0  # from the start of ranks to the first new step, from memory or a peer
    save: float = 5.0  # from a request to a commit
    every: float = 60.0  # between copies in memory
    silence: float = 40.0  # from the death of a node to the evidence that it is dead
    # Of the other policy: until Kubernetes replaces the pods of a dead node, as measured with an Indexed Job; restore.
    eviction: float = 352.0
    restore_from_store: float = 60.0
    every_from_store: float = 3600.0


@dataclass(frozen=True)
class Disruption:
    """An event of the month: the second, the kind, and the number of the node."""

    at: float
    kind: str  # spot, lost or crash
    node: int


def main(
    nodes: Annotated[list[int] | None, typer.Argument(help="Sizes of jobs; 8, 16, 32 and 64 if absent.")] = None,
    events: Annotated[Path, typer.Option(help="A CSV file of seconds, kinds (spot, lost, crash) and nodes.")] = EVENTS,
    write: Annotated[bool, typer.Option(help="Write the file of events anew, and end.")] = False,
) -> None:
    """Print how much of a month jobs lose, write build/bench/month.json; exit 1 when it is more than 5 %."""
    if write:
        write_events(events)
        return
    console = Console(width=None if sys.stdout.isatty() else 120)
    report(measured(nodes or SIZES, read_events(events)), console, RESULT)


def measured(sizes: Sequence[int], events: Sequence[Disruption]) -> Iterator[Row]:
    for size in sizes:
        own = [event for event in events if event.node < size]
        month = Month(size, Delays())
        ours = month.meet_events(own, MONTH)
        theirs = simulate_restarts(own, Delays(), MONTH)
        yield Row(
            f"month-{size}",
            "share lost",
            0.0,
            {"ours": [1 - ours / MONTH], "floor": [1 - theirs / MONTH]},
            allowance=LARGEST_LOSS,
        )


class Month(World):
    """A job with the delays of a cloud. A step is a second of training, as with any longer one."""

    def __init__(self, nodes: int, delays: Delays) -> None:
        super().__init__(job().nodes(nodes).timeouts(runtime="28d").build())
        self.delays, self.saves_in = delays, delays.save
        self.kinds: dict[str, int] = {}
        self._numbers = 0
        self._doomed: dict[str, float] = {}  # nodes that go away, and when
        self._silent: dict[str, float] = {}  # nodes that are dead, and when that shows

    def run_for(self, seconds: float) -> None:
        """Let time pass: by the second while something is under way, in leaps while all train."""
        end = self.now + seconds
        while self.now < end:
            step = 1.0 if self._is_busy() else min(end - self.now, 600.0)
            self.now += min(step, end - self.now)
            self._train(step)
            self._end_nodes()
            self.lead()
            self.start()
            self.bind()
            self.bury()
            self.reconcile()
            assert self.phase != "Failed", self.status.conditions

    def meet_events(self, events: Sequence[Disruption], seconds: float) -> float:
        """Let each event happen at its time, and return the seconds of training at the end, each step counted once."""
        began = self.now
        for event in events:
            self.run_for(began + event.at - self.now)
            self.disrupt(event)
        self.run_for(began + seconds - self.now)
        assert self.phase == "Running" or self._is_busy()
        return float(self.leader.step if self.leader and self.leader.phase == "running" else self.checkpoint)

    def disrupt(self, event: Disruption) -> None:
        pod = self.pods.get(f"{self.job.metadata.name}-{event.node}")
        if pod is None or pod.node is None or not pod.running or pod.node in {*self._doomed, *self._silent}:
            return  # nothing is there that could be disrupted
        self.kinds[event.kind] = self.kinds.get(event.kind, 0) + 1
        if event.kind == "spot":
            signal = NodeSignal(Reason.SPOT_INTERRUPTION, "taint aws-node-termination-handler/spot-itn", NOTICE)
            self._doomed[self.notice(event.node, signal)] = self.now + NOTICE
        elif event.kind == "lost":
            self.mute.add(pod.uid)
            self._silent[pod.node] = self.now + self.delays.silence
        else:
            self.fail_rank()

    def bind(self) -> None:
        for name, pod in self.pods.items():
            if pod.live and not pod.scheduled and self.now - pod.created >= self.delays.node:
                self._numbers += 1
                self.pods[name] = dataclasses.replace(pod, scheduled_at=self.now, node=f"node-{self._numbers}")

    def start(self) -> None:
        late = {
            name: pod
            for name, pod in self.pods.items()
            if pod.scheduled_at is not None and self.now - pod.scheduled_at < self.delays.pod
        }
        there, self.pods = self.pods, {name: pod for name, pod in self.pods.items() if name not in late}
        super().start()
        self.pods = {name: self.pods.get(name, pod) for name, pod in there.items()}

    def _train(self, seconds: float) -> None:
        leader = self.leader
        if leader is None or leader.phase != "running" or leader.started_at is None or leader.uid in self.mute:
            return
        if any(pod.uid in self.mute and pod.uid in leader.members for pod in self.pods.values()):
            return  # the others wait for it
        ready = leader.started_at + self.delays.restore
        before = leader.step
        leader.step += int(min(seconds, max(0.0, self.now - ready)))
        if leader.step > before:
            self.checkpoint = max(self.checkpoint, int(leader.step // self.delays.every * self.delays.every))

    def _is_busy(self) -> bool:
        """Tell whether anything but training is under way."""
        leader = self.leader
        settled = leader is not None and leader.phase == "running" and leader.outcome is None
        if not settled or self._doomed or self._silent or self.phase != "Running":
            return True
        assert leader is not None
        return leader.started_at is None or self.now < leader.started_at + self.delays.restore + 1

    def _end_nodes(self) -> None:
        for node in [name for name, at in self._doomed.items() if self.now >= at]:
            del self._doomed[node]
            for name in [name for name, pod in self.pods.items() if pod.node == node]:
                self.vanish(self.pods[name].index)
            self.nodes.pop(node, None)
        for node in [name for name, at in self._silent.items() if self.now >= at]:
            if any(pod.node == node for pod in self.pods.values()):
                self.nodes.setdefault(node, NodeView(node, silent_since=self.now))
            else:
                del self._silent[node]
                self.nodes.pop(node, None)


def simulate_restarts(events: Sequence[Disruption], delays: Delays, seconds: float) -> float:
    """Return the seconds of training of a job that saves to a store every so often, and begins again from there.

    A disruption during a restart begins it anew. Notices are of no use to it, so it trains until a node goes.
    """
    trained, saved, ready = 0.0, 0.0, delays.node + delays.pod
    for event in sorted(events, key=lambda each: _find_end(each)):
        at = _find_end(event)
        if at >= seconds:
            break
        if at > ready:
            trained = saved + at - ready
            saved += (at - ready) // delays.every_from_store * delays.every_from_store
        gone = {"spot": delays.node, "lost": delays.node + delays.eviction, "crash": 0.0}[event.kind]
        ready = max(ready, at + gone + delays.pod + delays.restore_from_store)
        trained = saved
    return saved + max(0.0, seconds - ready) if ready < seconds else trained


def _find_end(event: Disruption) -> float:
    return event.at + (NOTICE if event.kind == "spot" else 0.0)


def read_events(path: Path) -> list[Disruption]:
    """Return what a file of events says, in the order of time."""
    with path.open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    return sorted((Disruption(float(r["second"]), r["kind"], int(r["node"])) for r in rows), key=lambda each: each.at)


def make_events(nodes: int, seconds: float, seed: int = 0) -> list[Disruption]:
    """Draw a month: nodes are reclaimed alone, and one time in ten four to eight of them within a minute."""
    source, found = random.Random(seed), []

    def times(mean: float) -> Iterator[float]:
        at = source.expovariate(1 / mean)
        while at < seconds:
            yield at
            at += source.expovariate(1 / mean)

    alone = 1 / (0.9 + 0.1 * 6)  # reclaims per node are RECLAIMED_EVERY apart with those in company
    for node in range(nodes):
        for at in times(RECLAIMED_EVERY / alone):
            found.append(Disruption(at, "spot", node))
            if source.random() < 0.1:
                others = source.sample(range(nodes), source.randint(3, 7))
                found += [Disruption(at + source.uniform(0, 60), "spot", other) for other in others]
        found += [Disruption(at, "lost", node) for at in times(LOST_EVERY)]
    found += [Disruption(at, "crash", 0) for at in times(CRASH_EVERY)]
    return sorted(found, key=lambda each: each.at)


def write_events(path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("second", "kind", "node"))
        writer.writerows((round(event.at), event.kind, event.node) for event in make_events(max(SIZES), MONTH))


if __name__ == "__main__":
    typer.run(main)
