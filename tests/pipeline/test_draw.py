"""Timelines show every action in its place, and need nothing but themselves."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from everstep.pipeline.graph import Edge, Link, Stage, StageGraph, make_chain_graph, make_uniform_links
from everstep.pipeline.schedules import (
    NAMES,
    find_schedule,
    lower_schedule,
    make_schedule,
    render_html,
    render_svg,
    render_text,
    simulate_schedule,
)

GRAPH = make_chain_graph([Stage()] * 4)


def test_the_text_shows_who_does_what_when() -> None:
    assert render_text(simulate_schedule(make_schedule("1f1b", 2, 2, 3), make_chain_graph([Stage()] * 2))) == (
        "rank 0 |F0|F1|.....|B0   |F2|B1   |..|B2   |\n"  #
        "rank 1 ...|F0|B0   |F1|B1   |F2|B2   |......\n"
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("columns", [30, 80, 400])
def test_the_text_is_never_wider_than_asked_and_idle_time_is_dots(name: str, columns: int) -> None:
    stages = 4 * (find_schedule(name).chunks or 2)
    lines = render_text(
        simulate_schedule(make_schedule(name, stages, 4, 8), make_chain_graph([Stage()] * stages)), columns
    ).splitlines()
    assert len(lines) == 4
    assert len({len(line) for line in lines}) == 1
    assert len(lines[0]) <= columns
    assert lines[3].startswith("rank 3 .")


def test_the_second_stage_of_a_rank_has_small_letters_and_more_have_numbers() -> None:
    two = render_text(simulate_schedule(make_schedule("zb-v", 4, 2, 2), make_chain_graph([Stage()] * 4)))
    assert "|f0" in two
    assert "|F0" in two
    three = render_text(simulate_schedule(make_schedule("interleaved", 6, 2, 2), make_chain_graph([Stage()] * 6)))
    assert "|4F1" in three


def test_a_step_without_any_time_is_drawn_too() -> None:
    assert (
        render_text(simulate_schedule(make_schedule("simple", 1, 1, 1), StageGraph((Stage(0, 0, 0),)))) == "rank 0 |\n"
    )


def test_the_picture_has_a_box_for_each_action_at_its_time() -> None:
    schedule = make_schedule("zb-v", 8, 4, 6)
    graph = make_chain_graph([Stage()] * 8)
    result = simulate_schedule(schedule, graph)
    root = ElementTree.fromstring(render_svg(schedule, result, graph))
    space = {"s": "http://www.w3.org/2000/svg"}
    boxes = root.findall("s:g/s:rect", space)
    assert len(boxes) == len(result.timeline) == 4 * 2 * 6 * 3
    left = [float(box.get("x", "")) for box in boxes]
    scale = (left[1] - left[0]) / (result.timeline[1].start - result.timeline[0].start)
    for x, event in zip(left, result.timeline, strict=True):
        assert x == pytest.approx(left[0] + event.start * scale, abs=1.0)
    assert len(root.findall("s:g/s:path", space)) == 4  # memory curves
    titles = [title.text for title in root.iterfind("s:g/s:title", space)]
    assert titles[0] == "stage 0, forward of micro-batch 0 : 0 to 1 s"


def test_a_page_needs_nothing_else_and_escapes_names() -> None:
    graph = StageGraph((Stage(),) * 2, (Edge("<b>&", 0, (1,), 5),))
    schedule = lower_schedule(make_schedule("1f1b", 2, 2, 2), graph)
    page = render_html(
        schedule, simulate_schedule(schedule, graph, links=make_uniform_links(2, Link(5.0)), blocking=True), graph
    )
    assert "<b>" not in page
    assert "&lt;b&gt;&amp;" in page
    assert set(re.findall(r"https?://[^\"]*", page)) == {"http://www.w3.org/2000/svg"}
    assert "<script" not in page
    assert "src=" not in page
    for word in ("send", "receive", "2 stages, 2 ranks, 2 micro-batches", "values waiting"):
        assert word in page


DOCS = Path(__file__).parents[2] / "docs"
HOW_TO = (DOCS / "how-to" / "pipelines.md").read_text()


def test_the_pages_example_of_a_file_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (file,) = re.findall(r"^```text\n(.*?)^```$", HOW_TO, re.MULTILINE | re.DOTALL)
    blocks = re.findall(r"^```python\n(.*?)^```$", HOW_TO, re.MULTILINE | re.DOTALL)
    (code,) = [block for block in blocks if "mine.txt" in block]
    (tmp_path / "mine.txt").write_text(file)
    monkeypatch.chdir(tmp_path)
    exec(code, {})
