"""Graphs are data: they come back from their file as they were, and what cannot be is refused with the reason."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.pipeline.errors import PipelineError
from everstep.pipeline.graph import (
    Device,
    Edge,
    Graph,
    GraphNode,
    Link,
    Profile,
    Stage,
    StageGraph,
    make_uniform_links,
    stage_graph,
)
from tests.pipeline.random_pipelines import stage_graphs

EMBED = GraphNode("embed", (), 1.0, 0.0, 2.0, 100, 0, 10, ties=("wte",))
MASK = GraphNode("mask", (), 0.5, output=3, gradient=False)
BLOCK = GraphNode("block", ("embed", "mask"), 4.0, 5.0, 6.0, 200, 50, 10)
HEAD = GraphNode("head", ("block", "embed"), 2.0, 2.0, 2.0, 300, 7, 1, ties=("wte",))
GRAPH = Graph((EMBED, MASK, BLOCK, HEAD), shared=(("wte", 1000),))


def test_planning_parts_import_neither_torch_nor_numpy() -> None:
    code = "import sys, everstep.pipeline.advise; sys.exit(bool({'torch', 'numpy'} & {*sys.modules}))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_graph_and_a_profile_come_back_from_their_text() -> None:
    links = (*make_uniform_links(2, Link(1e9, 1e-5)), (Link(inf),))
    profile = Profile(GRAPH, (Device(0.5, 10), Device()), links, 4, {"block": 0.1}, "cpu")
    assert Graph.from_json(GRAPH.to_json()) == GRAPH
    assert Profile.from_json(profile.to_json()) == profile
    assert "Infinity" not in profile.to_json()


@settings(max_examples=10)
@given(st.integers(2, 5).flatmap(stage_graphs))
def test_a_stage_graph_comes_back_from_its_text(graph: StageGraph) -> None:
    assert StageGraph.from_json(graph.to_json()) == graph


def test_a_file_of_another_kind_version_or_shape_is_refused_with_the_reason() -> None:
    text = GRAPH.to_json()
    with pytest.raises(PipelineError, match="not JSON"):
        Graph.from_json("{")
    with pytest.raises(PipelineError, match="not a stages"):
        StageGraph.from_json(text)
    with pytest.raises(PipelineError, match="version 99"):
        Graph.from_json(text.replace('"version": 1', '"version": 99'))
    with pytest.raises(PipelineError, match=r"nodes\.2\.forward"):
        Graph.from_json(text.replace('"forward": 4.0', '"forward": "much"'))


def test_stages_are_the_sums_of_their_nodes_and_edges_are_the_values_that_leave() -> None:
    found = stage_graph(GRAPH, {"embed": 0, "mask": 0, "block": 1, "head": 2})
    assert found.stages[0] == Stage(1.5, 0.0, 2.0, 100, 1000)
    assert found.stages[1] == Stage(4.0, 5.0, 6.0, 200, 50)
    assert found.edges == (
        Edge("embed", 0, (1, 2), 10),
        Edge("mask", 0, (1,), 3, gradient=False),
        Edge("block", 1, (2,), 10),
    )
    assert found.ties == (("wte", (0, 2)),)


def test_a_stage_without_a_gradient_to_give_has_all_of_its_backward_with_its_weights() -> None:
    late = replace(HEAD, inputs=("mask",))
    first, second = stage_graph(
        Graph((MASK, EMBED, BLOCK, late), GRAPH.shared), {"mask": 0, "embed": 0, "block": 0, "head": 1}
    ).stages
    assert (first.input_grad, first.weight_grad) == (0.0, 5.0 + 2.0 + 6.0)
    assert (second.input_grad, second.weight_grad) == (0.0, 2.0 + 2.0)


def test_a_backward_at_once_has_a_time_of_its_own_which_is_not_above_that_of_its_parts() -> None:
    nodes = (EMBED, MASK, replace(BLOCK, unsplit=9.0), replace(HEAD, unsplit=5.0))
    first, second = stage_graph(Graph(nodes, GRAPH.shared), {"embed": 0, "mask": 0, "block": 0, "head": 1}).stages
    assert (second.input_grad, second.weight_grad, second.backward) == (2.0, 2.0, 4.0)
    # Nobody waits for the gradient of a batch: what would be in two parts is at once, with the weights.
    assert (first.input_grad, first.weight_grad, first.backward) == (0.0, 2.0 + 9.0, 2.0 + 9.0)
    middle = stage_graph(Graph(nodes, GRAPH.shared), {"embed": 0, "mask": 0, "block": 1, "head": 2}).stages[1]
    assert (middle.input_grad, middle.weight_grad, middle.backward) == (5.0, 6.0, 9.0)


def test_a_shared_parameter_counts_once_in_each_stage_that_owns_it() -> None:
    apart = stage_graph(GRAPH, {"embed": 0, "mask": 0, "block": 0, "head": 1})
    assert [stage.parameters for stage in apart.stages] == [1050, 1007]
    together = stage_graph(GRAPH, dict.fromkeys(("embed", "mask", "block", "head"), 0))
    assert [stage.parameters for stage in together.stages] == [1057]
    assert together.ties == ()


@pytest.mark.parametrize(
    ("nodes", "why"),
    [
        ((EMBED, EMBED), "twice"),
        ((BLOCK, EMBED), "'embed', which is no node before it"),
        ((replace(EMBED, name="a b"),), "one word"),
        ((replace(EMBED, ties=("other",)),), "give its bytes in shared"),
        ((replace(EMBED, forward=-1.0),), "forward is -1"),
        ((replace(EMBED, weight_grad=inf),), "weight_grad is inf"),
    ],
)
def test_a_graph_that_cannot_be_is_refused(nodes: tuple[GraphNode, ...], why: str) -> None:
    with pytest.raises(PipelineError, match=why):
        Graph(nodes, GRAPH.shared)


@pytest.mark.parametrize(
    ("stage_of", "why"),
    [
        ({"embed": 0, "mask": 0, "block": 1}, "'head' is in no stage"),
        ({"embed": 0, "mask": 0, "block": 1, "head": 3}, "without gaps"),
        ({"embed": 1, "mask": 0, "block": 0, "head": 1}, "'embed' of stage 1 would flow down to 'block' of stage 0"),
    ],
)
def test_a_placement_that_cannot_be_is_refused(stage_of: dict[str, int], why: str) -> None:
    with pytest.raises(PipelineError, match=why):
        stage_graph(GRAPH, stage_of)


def test_nodes_that_belong_together_are_one_stage() -> None:
    joined = Graph((GraphNode("a", colocate="alias"), GraphNode("b", ("a",)), GraphNode("c", ("b",), colocate="alias")))
    with pytest.raises(PipelineError, match=r"'a' \(stage 0\) and 'c' \(stage 1\) must be one stage: alias"):
        stage_graph(joined, {"a": 0, "b": 0, "c": 1})


@pytest.mark.parametrize(
    ("edges", "ties", "why"),
    [
        ((Edge("v", 1, (0,)),), (), "flow to higher stages"),
        ((Edge("v", 0, (2,)),), (), "flow to higher stages"),
        ((Edge("v", 0, ()),), (), "at least one"),
        ((Edge("v", 0, (1,)), Edge("v", 0, (1,))), (), "of one edge"),
        ((), (("w", (1,)),), "two or more"),
    ],
)
def test_a_stage_graph_that_cannot_be_is_refused(
    edges: tuple[Edge, ...], ties: tuple[tuple[str, tuple[int, ...]], ...], why: str
) -> None:
    with pytest.raises(PipelineError, match=why):
        StageGraph((Stage(), Stage()), edges, ties)
