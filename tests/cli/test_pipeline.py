"""`everstep pipeline …` as a user runs it: what it says and how it ends."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from everstep.pipeline.graph import Graph, GraphNode
from everstep.pipeline.plan import Plan
from everstep.pipeline.schedules import dump_schedule, make_schedule
from tests.cli.command import Done

Everstep = Callable[..., Done]


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    """Embedding, six layers, a head that takes as long as four of them and shares its weight with the embedding."""
    nodes = [GraphNode("embed", (), 0.1, 0.0, 0.1, 1 << 20, 0, 1 << 20, ties=("embed.weight",))]
    nodes += [
        GraphNode(f"layer.{i}", (nodes[-1].name if not i else f"layer.{i - 1}",), 1, 1, 1, 1 << 22, 1 << 20, 1 << 20)
        for i in range(6)
    ]
    nodes.append(GraphNode("head", ("layer.5",), 4, 4, 4, 1 << 20, 0, 1 << 10, ties=("embed.weight",)))
    (tmp_path / "graph.json").write_text(Graph(tuple(nodes), shared=(("embed.weight", 1 << 24),)).to_json())
    return tmp_path / "graph.json"


@pytest.fixture
def plan(everstep: Everstep, graph: Path) -> Path:
    done = everstep(
        "pipeline", "plan", "graph.json", "--ranks", "2", "--stages", "2", "--microbatches", "4", "--schedule", "1f1b"
    )
    assert done.returncode == 0, done.stderr
    return graph.parent / "plan.json"


def test_help_names_every_command_and_the_exit_codes(everstep: Everstep) -> None:
    done = everstep("pipeline", "--help")
    assert done.returncode == 0
    for command in ("plan", "show", "simulate"):
        assert f"\n  {command} " in done.stdout
    assert "Exit codes: 0" in done.stdout


def test_a_plan_is_made_from_a_graph_and_told(everstep: Everstep, graph: Path) -> None:
    done = everstep(
        "pipeline", "plan", "graph.json", "--ranks", "2", "--batch", "8", "--memory", "2GiB", "-o", "p.json"
    )
    assert done.returncode == 0, done.stderr
    assert "Wrote the plan to p.json." in done.stderr
    assert "no split can be better by more than 0.0" in done.stdout
    made = Plan.load(graph.parent / "p.json")
    assert made.schedule_name in done.stdout
    assert made.devices[0].memory == 2 << 30


def test_a_plan_is_made_anew_for_more_ranks(everstep: Everstep, plan: Path) -> None:
    done = everstep("pipeline", "plan", "plan.json", "--ranks", "4", "--schedule", "1f1b", "-o", "four.json")
    assert done.returncode == 0, done.stderr
    assert Plan.load(plan.parent / "four.json").placement == (0, 1, 2, 3)


def test_show_draws_the_step(everstep: Everstep, plan: Path) -> None:
    done = everstep("pipeline", "show", "plan.json", "--svg", "step.svg", "--html", "step.html", "--nodes")
    assert done.returncode == 0, done.stderr
    for part in ("STAGE", "RANK", "embed.weight is shared by stages 0, 1", "rank 1", "F0", "1 head", "cost nothing"):
        assert part in done.stdout
    assert (plan.parent / "step.svg").read_text().startswith("<svg")
    assert "</html>" in (plan.parent / "step.html").read_text()


def test_show_prints_the_actions_as_a_file_of_them(everstep: Everstep, plan: Path) -> None:
    done = everstep("pipeline", "show", "plan.json", "--actions")
    assert done.returncode == 0
    assert "0S0>1:layer." in done.stdout
    (plan.parent / "own.txt").write_text(done.stdout)
    assert everstep("pipeline", "simulate", "plan.json", "--schedule", "own.txt").returncode == 0


def test_simulate_compares(everstep: Everstep, plan: Path) -> None:
    done = everstep("pipeline", "simulate", "plan.json", "--speeds", "1,0.5", "--latency", "0.1")
    assert done.returncode == 0, done.stderr
    assert "PLANNED" in done.stdout
    assert "+" in done.stdout
    before = Plan.load(plan).prediction.seconds
    now = json.loads(everstep("pipeline", "simulate", "plan.json", "--microbatches", "8", "--json").stdout)
    assert now["seconds"] > before


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (("plan", "none.json", "--ranks", "2"), 1, "none.json"),
        (("plan", "graph.json", "--ranks", "2"), 1, "microbatches: give their number"),
        (("plan", "graph.json", "--ranks", "2", "--microbatches", "4", "--memory", "much"), 2, "--memory: 'much'"),
        (("plan", "graph.json", "--ranks", "2", "--microbatches", "4", "--memory", "1MiB"), 1, "memory"),
        (("plan", "graph.json", "--ranks", "2", "--microbatches", "a"), 2, "--microbatches: 'a'"),
        (("plan", "graph.json", "--ranks", "2", "--optimize", "both"), 2, "--optimize: 'both'"),
        (
            ("plan", "graph.json", "--ranks", "9", "--microbatches", "9", "--schedule", "1f1b", "--stages", "9"),
            1,
            "8 parts",
        ),
        (("plan", "graph.json", "--ranks", "2", "--bandwidth", "0"), 2, "--bandwidth: a link of 0"),
        (("show", "graph.json"), 1, "graph.json: not a plan of everstep"),
        (("simulate", "plan.json", "--speeds", "1,0"), 2, "--speeds: '1,0'"),
        (("simulate", "plan.json", "--speeds", "1,1,1"), 1, "speeds: 3 for 2 ranks"),
        (("simulate", "plan.json", "--schedule", "zb-v"), 1, "zb-v: is for 2 stages"),
        (("simulate", "plan.json", "--schedule", "half.txt"), 1, "schedule half: rank 0: 0B1 is missing"),
        (("plan", "graph.json", "--ranks", "2", "--schedule", "binary"), 1, "binary: not a text file"),
    ],
)
def test_errors_name_what_is_wrong(
    everstep: Everstep, plan: Path, arguments: tuple[str, ...], code: int, told: str
) -> None:
    (plan.parent / "half.txt").write_text("0F0 0F1 0B0\n1F0 1F1 1B0 1B1")
    (plan.parent / "binary").write_bytes(b"\xff\xfe")
    done = everstep("pipeline", *arguments)
    assert done.returncode == code, done.stderr
    assert told in done.stderr
    assert "Traceback" not in done.stderr


def test_nothing_is_written_where_nothing_fits(everstep: Everstep, graph: Path) -> None:
    done = everstep("pipeline", "plan", "graph.json", "--ranks", "2", "--microbatches", "4", "--memory", "1MiB")
    assert done.returncode == 1
    assert not (graph.parent / "plan.json").exists()


def test_a_schedule_of_a_file_is_planned_for(everstep: Everstep, graph: Path) -> None:
    (graph.parent / "mine.txt").write_text(dump_schedule(make_schedule("simple", 2, 2, 3)))
    done = everstep("pipeline", "plan", "graph.json", "--ranks", "2", "--schedule", "mine.txt")
    assert done.returncode == 0, done.stderr
    assert Plan.load(graph.parent / "plan.json").microbatches == 3
