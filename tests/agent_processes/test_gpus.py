"""A node's GPUs, asked for in processes of their own: their health as it changes, and what a sick driver cannot do."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from everstep.agent.system.gpu import count_gpus
from tests.agent.laptop import Laptop

from .node import DEADLINE, Node

pytestmark = pytest.mark.integration

FAKE = Path(__file__).with_name("fake_nvml")
A = {"uuid": "GPU-a", "name": "H100"}
B = {"uuid": "GPU-b", "name": "H100", "ecc": 0}
ELSEWHERE = 4_000_000_000  # no process here has it: one of another pod, as drivers without PID namespaces tell them
WELL = [{**A, "problem": ""}, {"uuid": "GPU-b", "name": "H100", "problem": ""}]


class Driver:
    """The file from which the fake library reads its devices at every call."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "nvml.json"
        self.is_now(A, B)

    def is_now(self, *devices: dict[str, Any]) -> None:
        self._write(list(devices))

    def hangs(self) -> None:
        self._write("hang")

    def _write(self, state: object) -> None:
        fresh = self._path.with_suffix(".new")
        fresh.write_text(json.dumps(state))
        fresh.replace(self._path)

    @property
    def environ(self) -> dict[str, str]:
        return {
            "NVIDIA_VISIBLE_DEVICES": "GPU-a,GPU-b",
            "PYTHONPATH": str(FAKE),
            "PYTHONDONTWRITEBYTECODE": "1",
            "FAKE_NVML": str(self._path),
        }


def rank(folder: Path) -> list[str]:
    """A command that tells its PID."""
    return ["sh", "-c", f"echo $$$$ > {folder}/pid.new && mv {folder}/pid.new {folder}/pid && exec sleep 600"]


async def pid_of_rank(node: Node, folder: Path) -> int:
    """Once it runs; the driver may go on to show it when it has been killed."""
    await node.until((folder / "pid").exists, "the rank")
    pid = int((folder / "pid").read_text())
    (folder / "pid").unlink()
    return pid


@pytest.fixture
def driver(tmp_path: Path) -> Driver:
    return Driver(tmp_path)


async def told(node: Node, gpus: list[dict[str, str]]) -> None:
    """Once the newest word on the devices is this."""
    await node.until(lambda: [e["gpus"] for e in node.all("Gpus")][-1:] == [gpus], f"{gpus}")


async def test_what_changes_about_a_device_is_told_once(tmp_path: Path, driver: Driver, python: str) -> None:
    async with Node(tmp_path, ["true"], environ=driver.environ, python=python) as node:
        await node.call("watch", every=0.05)
        await told(node, WELL)
        driver.is_now(A, {**B, "ecc": 2})
        await told(node, [WELL[0], {**WELL[1], "problem": "2 uncorrected memory errors"}])
        driver.is_now(A, {**B, "ecc": 2, "remap_failed": True})
        await told(node, [WELL[0], {**WELL[1], "problem": "no spare memory rows are left"}])
        assert len(node.all("Gpus")) == 3


@pytest.mark.parametrize(
    ("devices", "problem"),
    [
        ([A, {"lost": True}], "GPU is lost"),
        ([A], "the driver does not show it any more"),
    ],
)
async def test_a_device_that_falls_off_the_bus_is_missed_by_its_name(
    tmp_path: Path, driver: Driver, devices: list[dict[str, Any]], problem: str
) -> None:
    async with Node(tmp_path, ["true"], environ=driver.environ) as node:
        await node.call("watch", every=0.05)
        await told(node, WELL)
        driver.is_now(*devices)
        await told(node, [WELL[0], {**WELL[1], "problem": problem}])
        driver.is_now(A, B)  # somebody has reset it
        await told(node, WELL)


async def test_a_device_that_was_lost_before_the_job_is_told_without_a_name(tmp_path: Path, driver: Driver) -> None:
    driver.is_now(A, {"lost": True})
    async with Node(tmp_path, ["true"], environ=driver.environ) as node:
        await node.call("watch", every=0.05)
        await told(node, [WELL[0], {"uuid": "", "name": "", "problem": "GPU is lost"}])


async def test_a_driver_that_hangs_costs_one_killed_process_and_is_told(tmp_path: Path, driver: Driver) -> None:
    async with Node(tmp_path, ["true"], environ=driver.environ, gpu_timeout=2.0) as node:
        await node.call("watch", every=0.05)
        await told(node, WELL)
        driver.hangs()
        silent = "the GPU driver did not answer within 2 s"
        await told(node, [{**gpu, "problem": silent} for gpu in WELL])
        worst, _ = await node.call("lag", seconds=2.5)
        assert worst < 1.5, "the agent waited for the driver itself"
        driver.is_now(A, B)
        await told(node, WELL)


async def test_a_node_whose_driver_hangs_is_not_clean(tmp_path: Path, driver: Driver) -> None:
    """Nobody can say whether the killed ranks have given their memory back."""
    async with Node(tmp_path, rank(tmp_path), environ=driver.environ, gpu_timeout=3.0, clean_timeout=1.0) as node:
        await node.start()
        await pid_of_rank(node, tmp_path)
        driver.hangs()
        assert await node.stop() == "the GPU driver did not answer within 3 s"
        await node.start()
        killed = await pid_of_rank(node, tmp_path)
        driver.is_now(A, {**B, "pids": [killed]})
        assert await node.stop() == f"GPU still used by processes {killed}"
        driver.is_now(A, B)
        await node.start()
        assert await node.stop() is None


@pytest.mark.parametrize(
    "noise", [{"LD_PRELOAD": "/nonexistent/libjemalloc.so"}, {"PYTHONPROFILEIMPORTTIME": "1"}, {"PYTHONVERBOSE": "2"}]
)
async def test_what_an_image_says_besides_hides_no_process_on_a_gpu(
    tmp_path: Path, driver: Driver, noise: dict[str, str]
) -> None:
    """A loader's warnings, or a debugging aid of the user's, of any length: nothing starts beside what is left."""
    async with Node(tmp_path, rank(tmp_path), environ={**driver.environ, **noise}, clean_timeout=1.0) as node:
        await node.start()
        killed = await pid_of_rank(node, tmp_path)
        driver.is_now(A, {**B, "pids": [killed]})
        assert await node.stop() == f"GPU still used by processes {killed}"


async def test_a_strangers_process_on_a_gpu_holds_no_job_up(tmp_path: Path, driver: Driver) -> None:
    """On a laptop, a desktop or a notebook computes beside the job; in a pod, a debugger does."""
    with subprocess.Popen(["sleep", "600"]) as stranger:  # noqa: ASYNC220 - it returns at once
        try:
            driver.is_now(A, {**B, "pids": [stranger.pid]})
            async with Node(tmp_path, rank(tmp_path), environ=driver.environ, clean_timeout=1.0) as node:
                await node.start()
                await pid_of_rank(node, tmp_path)
                assert await node.stop() is None
                await node.start()
                killed = await pid_of_rank(node, tmp_path)
                driver.is_now(A, {**B, "pids": [stranger.pid, killed]})
                assert await node.stop() == f"GPU still used by processes {killed}"
        finally:
            stranger.kill()


async def test_other_pods_on_a_shared_gpu_hold_no_job_up(tmp_path: Path, driver: Driver) -> None:
    """With time-slicing or MPS they always compute there. What the driver still shows of this pod is waited for."""
    driver.is_now(A, {**B, "pids": [ELSEWHERE]})
    async with Node(tmp_path, rank(tmp_path), environ=driver.environ, clean_timeout=1.0) as node:
        for _ in range(2):
            await node.start()
            await pid_of_rank(node, tmp_path)
            assert await node.stop() is None
        said = f"other processes use the GPUs as well: {ELSEWHERE}"
        await node.until(lambda: said in node.logged(), "a line about them")
        assert node.logged().count(said) == 1, "they were waited for again"
        await node.start()
        killed = await pid_of_rank(node, tmp_path)
        driver.is_now(A, {**B, "pids": [ELSEWHERE, killed]})
        assert await node.stop() == f"GPU still used by processes {killed}"


# A launcher, as torchrun: it is the agent's child, what computes is its own, and it reaps that itself.
LAUNCHER = """
import os, pathlib, signal, subprocess, sys, threading
worker = subprocess.Popen(["sleep", "600"])
signal.signal(signal.SIGTERM, lambda *_: worker.kill())
folder = pathlib.Path(sys.argv[1])
(folder / "pid.new").write_text(str(worker.pid))
os.replace(folder / "pid.new", folder / "pid")
sys.exit(1 if worker.wait() else 0)
"""


@pytest.mark.parametrize("crashed", [False, True])
async def test_what_a_launcher_has_reaped_itself_is_waited_for(tmp_path: Path, driver: Driver, crashed: bool) -> None:
    """The driver may take longer to tear its contexts down than strangers on a shared GPU are waited for."""
    command = [sys.executable, "-c", LAUNCHER, str(tmp_path)]
    async with Node(tmp_path, command, environ=driver.environ, clean_timeout=1.0, note_interval=0.01) as node:
        await node.start()
        worker = await pid_of_rank(node, tmp_path)
        driver.is_now(A, {**B, "pids": [worker]})
        if crashed:
            async with asyncio.timeout(DEADLINE):
                while not await node.call("has_run_here", pid=worker):
                    pass
            os.kill(worker, signal.SIGKILL)
            await node.event("RankExited")
        assert await node.stop(grace=60) == f"GPU still used by processes {worker}"


async def test_without_the_library_nothing_is_known_and_nothing_fails(tmp_path: Path, driver: Driver) -> None:
    environ = {**driver.environ, "PYTHONPATH": str(tmp_path)}
    async with Node(tmp_path, ["true"], environ=environ) as node:
        if await node.call("gpus") is not None:
            pytest.skip("this Python has nvidia-ml-py, and a driver")
        await node.start()
        assert await node.stop() is None


def test_the_leader_hears_of_every_nodes_devices(tmp_path: Path, driver: Driver) -> None:
    driver.is_now(A, {**B, "ecc": 1})
    with Laptop(tmp_path, ["sleep", "60"], environ=driver.environ) as job:
        gpus = job.until(lambda s: s["gpus"] and s["gpus"]["unhealthy"] == 2, "both nodes' devices")["gpus"]
        assert gpus["models"] == {"H100": 4}
        assert [(d["index"], d["uuid"], d["problem"]) for d in gpus["devices"]] == [
            (index, "GPU-b", "1 uncorrected memory errors") for index in range(2)
        ]


def test_without_gpus_nobody_asks(tmp_path: Path, driver: Driver) -> None:
    """No process, not even once."""
    if count_gpus({}):
        pytest.skip("this machine has some")
    (tmp_path / "bin").mkdir()
    asked = tmp_path / "asked"
    (tmp_path / "bin/pynvml.py").write_text(f"open({str(asked)!r}, 'w')")
    environ = {"NVIDIA_VISIBLE_DEVICES": "void", "PYTHONPATH": str(tmp_path / "bin")}
    with Laptop(tmp_path / "job", ["sleep", "60"], environ=environ) as job:
        assert job.until(lambda s: s["phase"] == "running")["gpus"] is None
        job.client().stop("enough")
        job.until(lambda s: s["outcome"])  # the ranks are stopped, and nobody has looked for what they left on a GPU
    assert not asked.exists()
