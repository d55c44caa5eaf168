"""The demo says beforehand what it will do, and shows how far it is."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from e2e import demo_steps, deploy
from e2e.cluster import binaries
from e2e.cluster.local import LocalCluster
from e2e.demo_steps import DemoStep, StepCost, Track
from e2e.images import engine
from e2e.images.catalogue import image


@pytest.fixture
def nothing_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EVERSTEP_CACHE", str(tmp_path))
    monkeypatch.setattr(engine, "is_present", lambda: False)
    return tmp_path


def said(tracks: list[Track]) -> str:
    output = io.StringIO()
    demo_steps.announce(Console(file=output, width=200), tracks, 100, ["buildah"])
    return output.getvalue()


def test_from_nothing_every_part_is_named_with_a_measured_cost(nothing_built: Path) -> None:
    programs = deploy.programs(LocalCluster())
    tracks = [
        Track("programs", demo_steps.program_steps(programs)),
        Track("images", demo_steps.image_steps(image(name) for name in deploy.DEMO_IMAGES)),
    ]
    assert all(step.cost is not demo_steps.UNKNOWN for track in tracks for step in track.steps)
    text = said(tracks)
    assert all(name in text for name in programs)
    assert "build the image trainer" in text
    assert "horovod" not in text
    assert "operator:next" not in str(tracks)
    assert str(nothing_built) in text
    assert "packages that are installed: buildah" in text


def test_what_is_there_is_not_announced(nothing_built: Path) -> None:
    for name in deploy.programs(LocalCluster()):
        path = binaries.path_of(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    tracks = [Track("programs", demo_steps.program_steps(deploy.programs(LocalCluster())))]
    assert said(tracks).splitlines()[-1] == "This takes about 2 minutes on two idle cores."
    assert "compile" not in said(tracks)


def test_a_bar_moves_by_the_clock_and_waits_for_the_end_of_its_step() -> None:
    track = Track("x", [DemoStep("one", "", StepCost(100)), DemoStep("two", "", StepCost(300))], since=1000)
    assert track.estimate(1040) == 40
    assert track.estimate(9000) == 95
    track.finish("of another track", 9000)
    track.finish("one", 2000)
    assert track.estimate(2030) == 130
    track.finish("two", 2500)
    assert track.estimate(9000) == track.seconds == 400
    assert track.current is None


def test_too_small_a_disk_is_named_before_anything_is_built(nothing_built: Path) -> None:
    assert demo_steps.missing_disk(StepCost(1)) is None
    reason = demo_steps.missing_disk(StepCost(1, stored=10**9))
    assert reason is not None
    assert "EVERSTEP_CACHE" in reason
