"""Ranks that torchrun starts are killed again and again: each time training goes on at the newest step, bit for bit."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from tests.checkpoint.restarted_training import EVERY
from tests.long_sweeps import only_in_long_sweeps

pytestmark = pytest.mark.torch

PROGRAM = Path(__file__).with_name("restarted_training.py")
STOP = 20
PATIENCE = 240.0  # seconds
KILLS = "1:6,0:11,1:17"  # as the program takes them
BEGINS = [0, 4, 8, 16]


def start(folder: Path, world: int, kind: str, stop: int = STOP, kills: str = "", restarts: int = 0) -> Any:
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    command += [f"--max-restarts={restarts}", str(PROGRAM), str(folder), kind, str(stop), *filter(None, [kills])]
    # gloo of torch 2.15 finds addresses of ranks that died in a store that outlives them, and gives a restart away.
    own = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(PROGRAM.parents[2])}
    with (folder / "log").open("ab") as log:
        return subprocess.Popen(command, env=os.environ | own, stdout=log, stderr=log, start_new_session=True)


def finish(folder: Path, process: Any) -> int:
    try:
        return int(process.wait(PATIENCE))
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            print((folder / "log").read_text()[-5000:])


def run(folder: Path, *args: Any, **options: Any) -> dict[str, list[dict[str, Any]]]:
    """Run to the end, and return what each rank has told in each restart, by `<restart>-<rank>`."""
    assert finish(folder, start(folder, *args, **options)) == 0, (folder / "log").read_text()[-5000:]
    return told(folder)


def told(folder: Path) -> dict[str, list[dict[str, Any]]]:
    lines = {file.name: file.read_text().splitlines() for file in folder.glob("[0-9]-[0-9]")}
    # The last line may be one of a rank that died within it.
    return {name: [json.loads(each) for each in found if each.endswith("}")] for name, found in lines.items()}


def steps_of(lines: list[dict[str, Any]]) -> dict[int, tuple[str, str]]:
    return {each["step"]: (each["loss"], each["state"]) for each in lines if "step" in each}


def check_same(straight: dict[str, list[dict[str, Any]]], other: dict[str, list[dict[str, Any]]]) -> None:
    """See that each step of a run was the same, and each state that a restart began with, as in the undisturbed run."""
    for name, lines in other.items():
        expected = steps_of(straight[f"0-{name[-1]}"])
        assert steps_of(lines).items() <= expected.items(), name
        for each in lines:
            if each.get("start"):
                assert each["state"] == expected[each["start"] - 1][1], name


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("kind", "world"),
    [("fsdp", 3), *only_in_long_sweeps(("ddp", 2), ("ddp", 3), ("fsdp", 2))],
)
def test_a_run_whose_ranks_are_killed_three_times_ends_as_the_undisturbed_one(
    kind: str, world: int, tmp_path: Path
) -> None:
    straight = run(tmp_path / "straight", world, kind)
    killed = run(tmp_path / "killed", world, kind, kills=KILLS, restarts=3)
    assert killed.keys() == {f"{restart}-{rank}" for restart in range(4) for rank in range(world)}
    for name, (first, *_) in killed.items():
        assert first["start"] == BEGINS[int(name[0])]
    check_same(straight, killed)
    assert all(steps_of(killed[f"3-{rank}"]).keys() == set(range(BEGINS[3], STOP)) for rank in range(world))


@pytest.mark.timeout(900)
@pytest.mark.chaos
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_uneven_shards_survive_a_kill_at_any_moment_and_fit_another_number_of_ranks(seed: int, tmp_path: Path) -> None:
    world, chance = 3, random.Random(seed)
    straight = run(tmp_path / "straight", world, "fsdp")
    folder = tmp_path / "killed"
    process = start(folder, world, "fsdp")
    victim, least = chance.randrange(world), chance.randrange(6, 14)
    until = time.monotonic() + PATIENCE
    while len(told(folder).get(f"0-{victim}", ())) <= least:
        assert time.monotonic() < until, (folder / "log").read_text()[-5000:]
        assert process.poll() is None, (folder / "log").read_text()[-5000:]
        time.sleep(0.001)
    os.kill(told(folder)[f"0-{victim}"][0]["pid"], signal.SIGKILL)
    assert finish(folder, process) != 0
    before = told(folder)
    done = min(max(steps_of(lines)) for lines in before.values())
    check_same(straight, before)
    for number in (2, 3):
        for file in folder.glob("[0-9]-[0-9]"):
            file.unlink()
        after = run(folder, number, "fsdp", stop=STOP if number == world else 0)
        assert {lines[0]["start"] for lines in after.values()} >= {after["0-0"][0]["start"]}
        assert after["0-0"][0]["start"] >= done // EVERY * EVERY, "a newer step was saved by all ranks"
        if number == world:
            check_same(straight, after)
            assert max(steps_of(after["0-0"])) == STOP - 1
        else:
            begun = after["0-0"][0]
            assert begun["state"] == steps_of(straight["0-0"])[begun["start"] - 1][1]
