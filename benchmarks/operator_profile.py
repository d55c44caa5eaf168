"""`python -m benchmarks.operator_profile`: what the operator costs for each pod, part by part, in seconds of your time.

The real operator, with its queue, its caches, its plans and its requests, against a generated cluster that binds pods
at the rate of a scheduler (generated_cluster.py). It measures processor time of the operator's process alone. The time
of its main thread is divided by samples of what it does at the moment, once a millisecond of processor time; other
threads have a row of their own. There is no TLS: a real API server adds the cost of encryption.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import structlog
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.generated_cluster import serve_cluster
from everstep import agent_zip
from everstep_operator.app import Operator
from everstep_operator.cluster.agent_code import AgentCode
from everstep_operator.cluster.client import Client
from everstep_operator.settings import OperatorSettings

SAMPLE_SECONDS = 0.001
SETTLE_SECONDS = 1.0  # after the last event: what was put off is done then
KEY = bytes(range(32))
# The first that matches one of the frames of a sample names its part: a file, and a function or none.
PARTS = (
    ("create pods", "action_executor.py", "_create_pod"),
    ("delete pods", "action_executor.py", "_delete_pod"),
    ("events", "app.py", "_receive_event"),
    ("events", "watch.py", ""),
    ("events", "object_stream.py", ""),
    ("lists", "resync.py", ""),
    ("leaders", "leader_poller.py", ""),
    ("plan", "planner.py", "make_plan"),
    ("observe", "reconcile.py", "_observe"),
    ("write the status", "reconcile.py", "_write_status"),
    ("other actions", "action_executor.py", ""),
    ("rest of reconciles", "reconcile.py", ""),
    ("queue", "work_queue.py", ""),
    ("connections", "client_proto.py", ""),
    ("connections", "selector_events.py", ""),
    ("connections", "sslproto.py", ""),
)
REST, THREADS = "event loop and rest", "other threads"


@dataclass
class Sampler:
    """Counts where the main thread is, by processor time of the process."""

    samples: Counter[str]

    def take(self, _: int, frame: FrameType | None) -> None:
        """Take one sample; one in which the loop waits for its sockets is none."""
        if frame is not None and frame.f_code.co_filename.endswith("selectors.py"):
            return
        self.samples[find_part(frame)] += 1


def find_part(frame: FrameType | None) -> str:
    """Return the part of the operator that a stack belongs to."""
    codes = [each.f_code for each in list_frames(frame)]
    frames = {(code.co_filename.rpartition("/")[2], code.co_name) for code in codes}
    files = {file for file, _ in frames}
    for part, file, function in PARTS:
        if (file, function) in frames if function else file in files:
            return part
    return REST


def list_frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and those that have called it."""
    while frame is not None:
        yield frame
        frame = frame.f_back


@dataclass
class Profile:
    """Processor time of one run, in milliseconds for each pod."""

    name: str
    seconds: float  # from the creation of the jobs until the last reconcile
    reconciles: int
    requests: float  # of the operator, for each pod
    parts: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.parts.values())


async def profile_operator(jobs: int, pods: int, rate: float) -> Profile:
    """Run the operator until all pods are ready and it has nothing to do."""
    spawn = multiprocessing.get_context("spawn")
    control, theirs = spawn.Pipe()
    server = spawn.Process(target=serve_cluster, args=(jobs, pods, rate, theirs), daemon=True)
    server.start()
    try:
        port = await asyncio.to_thread(control.recv)
        with tempfile.TemporaryDirectory() as folder:
            kubeconfig = write_kubeconfig(Path(folder), port)
            return await _measure(jobs, pods, kubeconfig, control)
    finally:
        control.send("end")
        await asyncio.to_thread(server.join, 5)
        server.kill()


async def _measure(jobs: int, pods: int, kubeconfig: Path, control: Any) -> Profile:
    client = await Client.connect(str(kubeconfig))
    settings = OperatorSettings.load({}, {"kubeconfig": str(kubeconfig), "agent_port": 1})
    operator = Operator(settings, client, (KEY,), AgentCode(agent_zip.build_zipapp()))
    stop = asyncio.Event()
    running = asyncio.create_task(operator.run(stop))
    await wait_until(lambda: operator.resync.done_at is not None)
    await asyncio.sleep(SETTLE_SECONDS)  # the watch has begun, and its list is over
    reconciles, plain = 0, operator.reconciler.reconcile

    async def count(key: Any) -> Any:
        nonlocal reconciles
        reconciles += 1
        return await plain(key)

    operator.reconciler.reconcile = count  # type: ignore[method-assign]
    sampler = Sampler(Counter())
    signal.signal(signal.SIGPROF, sampler.take)
    signal.setitimer(signal.ITIMER_PROF, SAMPLE_SECONDS, SAMPLE_SECONDS)
    begun, main, all_threads = time.monotonic(), time.thread_time(), time.process_time()
    control.send("begin")
    requests = await asyncio.to_thread(control.recv)
    await wait_until(lambda: is_over(operator, jobs * pods))
    seconds = time.monotonic() - begun
    await asyncio.sleep(SETTLE_SECONDS)
    main, all_threads = time.thread_time() - main, time.process_time() - all_threads
    signal.setitimer(signal.ITIMER_PROF, 0)
    stop.set()
    await running
    await client.close()
    taken, count_of_pods = sum(sampler.samples.values()) or 1, jobs * pods
    parts = {part: 1000 * main * samples / taken / count_of_pods for part, samples in sampler.samples.most_common()}
    parts[THREADS] = 1000 * (all_threads - main) / count_of_pods
    return Profile(f"{jobs} x {pods:,}", seconds, reconciles, requests / count_of_pods, parts)


async def wait_until(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds, which is looked at ten times a second."""
    while not condition():  # noqa: ASYNC110 (it is the operator's state, of which no event tells)
        await asyncio.sleep(0.1)


def is_over(operator: Operator, pods: int) -> bool:
    """Tell whether the operator knows that all pods run, and has nothing to do."""
    if operator.queue.depth or operator.queue.in_work or len(operator.cache.pods) < pods:
        return False
    return all(pod.started_at is not None for _, (_, pod) in operator.cache.pods.items())


def write_kubeconfig(folder: Path, port: int) -> Path:
    """Return a kubeconfig for the server at a port of this machine."""
    path = folder / "kubeconfig"
    content = {
        "apiVersion": "v1", "kind": "Config", "current-context": "profile",
        "clusters": [{"name": "profile", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
        "users": [{"name": "profile", "user": {}}],
        "contexts": [{"name": "profile", "context": {"cluster": "profile", "user": "profile"}}],
    }  # fmt: skip
    path.write_text(json.dumps(content))
    return path


def print_profiles(profiles: list[Profile], console: Console) -> None:
    """Print one column for each run."""
    table = Table(title="processor time of the operator, ms for each pod")
    table.add_column("part")
    for profile in profiles:
        table.add_column(profile.name, justify="right")
    parts = Counter[str]()
    for profile in profiles:
        parts.update(profile.parts)
    for part, _ in parts.most_common():
        table.add_row(part, *(f"{profile.parts.get(part, 0.0):.3f}" for profile in profiles))
    table.add_section()
    table.add_row("all", *(f"{profile.total:.2f}" for profile in profiles))
    table.add_row("reconciles", *(str(profile.reconciles) for profile in profiles))
    table.add_row("requests per pod", *(f"{profile.requests:.2f}" for profile in profiles))
    table.add_row("seconds", *(f"{profile.seconds:.1f}" for profile in profiles))
    console.print(table)


def parse_shape(text: str) -> tuple[int, int]:
    """Return the number of jobs and the pods of each, as `100x10` says."""
    jobs, _, pods = text.partition("x")
    if not (jobs.isdecimal() and pods.isdecimal() and int(jobs) and int(pods)):
        raise typer.BadParameter(f"{text!r}: expected <jobs>x<pods of each>, such as 100x10")
    return int(jobs), int(pods)


def main(
    shapes: Annotated[list[str] | None, typer.Argument(help="Jobs and pods of each, such as 100x10.")] = None,
    rate: Annotated[float, typer.Option(help="Pods that the scheduler binds in a second.")] = 200.0,
) -> None:
    """Measure, print a table, write build/bench/operator-profile.json."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    asked = [parse_shape(shape) for shape in shapes or ("1x1000", "100x10")]
    profiles = [asyncio.run(profile_operator(jobs, pods, rate)) for jobs, pods in asked]
    print_profiles(profiles, Console(width=None if sys.stdout.isatty() else 120))
    path = Path("build/bench/operator-profile.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([vars(profile) | {"total": profile.total} for profile in profiles], indent=2))


if __name__ == "__main__":
    typer.run(main)
