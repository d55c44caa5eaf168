"""Progress: any program can report a step; nothing that is written can hurt the agent or the rank."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.agent.ranks.progress import ProgressUpdate

from .node import SOURCE, Node


async def test_a_shell_can_report_progress(tmp_path: Path, python: str) -> None:
    command = ["sh", "-c", 'echo "step=12 total=100 loss=0.5 phase=eval" > "$EVERSTEP_PROGRESS"; sleep 600']
    async with Node(tmp_path, command, python=python) as node:
        await node.start()
        event = await node.event("RankProgressed")
    assert event == {
        "kind": "RankProgressed",
        "generation": 1,
        "rank": 0,
        "step": 12,
        "total": 100,
        "phase": "eval",
        "metrics": {"loss": 0.5},
        "checkpoint": None,
    }


async def test_a_shell_can_report_a_checkpoint_without_changing_the_phase(tmp_path: Path) -> None:
    said = 'echo "step=12 phase=eval" > "$EVERSTEP_PROGRESS"; echo "checkpoint=10 restored=5" > "$EVERSTEP_PROGRESS"'
    async with Node(tmp_path, ["sh", "-c", said]) as node:
        await node.start()
        await node.event("RankExited")
        last = node.all("RankProgressed")[-1]
    assert (last["step"], last["phase"], last["metrics"]) == (12, "eval", {})
    assert (last["checkpoint"]["checkpoint"], last["checkpoint"]["restored"]) == (10, 5)


async def test_the_last_words_of_a_rank_are_heard_before_its_exit(tmp_path: Path) -> None:
    command = ["sh", "-c", 'for i in $(seq 500); do echo "step=$i" > "$EVERSTEP_PROGRESS"; done']
    async with Node(tmp_path, command) as node:
        await node.start()
        await node.event("RankExited")
        kinds = [event["kind"] for event in node.events]
        assert node.all("RankProgressed")[-1]["step"] == 500
        assert kinds[-1] == "RankExited"
        assert len(node.all("RankProgressed")) < 100


async def test_a_process_that_goes_on_writing_does_not_keep_its_ranks_exit_back(tmp_path: Path) -> None:
    """It was left behind by the rank, and fills the pipe faster than an agent can read."""
    flood = 'for i in 1 2 3 4; do yes "step=1 loss=0.5" > "$EVERSTEP_PROGRESS" & done; sleep 1; exit 3'
    async with Node(tmp_path, ["sh", "-c", flood]) as node:
        await node.start()
        assert (await node.event("RankExited"))["exit_code"] == 3
        assert await node.stop() is None


async def test_garbage_is_ignored_and_noticed_once(tmp_path: Path) -> None:
    script = "exec > $EVERSTEP_PROGRESS; head -c 300000 /dev/urandom; echo; echo step=7; echo; echo step=8"
    async with Node(tmp_path, ["sh", "-c", script]) as node:
        await node.start()
        await node.event("RankExited")
        assert node.all("RankProgressed")[-1]["step"] == 8
        await node.stop()
    assert node.logged().count("everstep: ignored") == 1


async def test_the_library_reports_from_python(tmp_path: Path) -> None:
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import everstep\n"
        "everstep.progress(1, total=10, loss=0.25, bad='x', worse=object())\n"
        "import everstep.progress\n"  # binds the submodule over the function's name
        "everstep.progress(2, 10, phase='checkpoint')\n"
        "from everstep.progress import progress\n"
        "progress(3, 10, loss=1)\n"
    )
    async with Node(tmp_path, [sys.executable, "-S", "-c", script, str(SOURCE)]) as node:
        await node.start()
        ended = await node.event("RankExited")
        assert ended["exit_code"] == 0, ended
        last = node.all("RankProgressed")[-1]
    assert (last["step"], last["total"], last["phase"], last["metrics"]) == (3, 10, "train", {"loss": 1.0})


def test_the_library_does_nothing_outside_of_a_job_and_never_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import everstep

    monkeypatch.delenv("EVERSTEP_PROGRESS", raising=False)
    everstep.progress(1)
    monkeypatch.setenv("EVERSTEP_PROGRESS", str(tmp_path / "missing"))
    everstep.progress(1)
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    monkeypatch.setenv("EVERSTEP_PROGRESS", str(fifo))
    everstep.progress(1)  # nobody reads
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    for step in range(20_000):  # far more than a pipe holds: one call that blocks would never return
        everstep.progress(step)
    os.close(reader)
    everstep.progress(1)  # the reader is gone: EPIPE, no SIGPIPE in Python
    monkeypatch.delenv("EVERSTEP_PROGRESS")
    everstep.progress(1)


def test_the_package_is_light_to_import(tmp_path: Path) -> None:
    import subprocess

    code = "import sys; sys.path.insert(0, sys.argv[1]); import everstep; everstep.progress(1)\n"
    code += "print([m for m in sys.modules if m in ('torch', 'numpy', 'asyncio', 'pydantic')])"
    done = subprocess.run([sys.executable, "-S", "-c", code, str(SOURCE)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@given(st.text(max_size=300))
def test_no_line_can_break_the_parser(line: str) -> None:
    update = ProgressUpdate()
    update.take(line)
    assert update.step is None or 0 <= update.step <= 2**53
    assert len(update.metrics) <= 32


@pytest.mark.parametrize(
    ("line", "step", "metrics"),
    [
        ("step=12 loss=nan", 12, {}),
        ("step=-1 loss=1e3", None, {"loss": 1000.0}),
        ("step=٣", None, {}),
        ("step=1e9", None, {}),
        ("step=99999999999999999999", None, {}),
        ("step=3 =5 a= loss==2", 3, {}),
    ],
)
def test_odd_values(line: str, step: int | None, metrics: dict[str, float]) -> None:
    update = ProgressUpdate()
    update.take(line)
    assert (update.step, update.metrics) == (step, metrics)
