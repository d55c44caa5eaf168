"""A plan fits what was asked for, is whole in its file, and is made anew when the ranks change."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from everstep.pipeline.errors import PipelineError
from everstep.pipeline.graph import Device, Graph, GraphNode, Link, Profile, make_uniform_links
from everstep.pipeline.plan import Plan, fingerprint_parameters, graph_hash
from everstep.pipeline.planning import Wish, scale_graph, solve_again, solve_plan
from everstep.pipeline.schedules import dump_schedule, make_schedule, parse_schedule

MIB = 2**20


def layers(*forward: float) -> Profile:
    """A chain in which backward takes twice as long as forward."""
    nodes = tuple(
        GraphNode(
            f"layer.{index}",
            (f"layer.{index - 1}",) if index else (),
            seconds,
            seconds,
            seconds,
            activation=4 * MIB,
            parameters=MIB,
            output=MIB,
        )
        for index, seconds in enumerate(forward)
    )
    return Profile(Graph(nodes), samples=4)


@pytest.fixture(scope="module")
def plan() -> Plan:
    """Two ranks, a heavy head: the last layer alone takes as long as four others."""
    profile = replace(layers(1, 1, 1, 1, 1, 1, 4), links=make_uniform_links(2, Link(1e9, 1e-4)))
    return solve_plan(profile, Wish(ranks=2, stages=2, microbatches=(8,), schedule="1f1b"))


def test_a_plan_balances_the_work(plan: Plan) -> None:
    assert [stage.forward for stage in plan.stages.stages] == [5, 5]
    assert plan.prediction.seconds == pytest.approx((8 + 1) * 15, rel=1e-3)
    assert plan.prediction.gap == pytest.approx(0.0, abs=1e-6)


def test_a_plan_comes_back_from_its_file_as_it_was(plan: Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again == plan
    assert again.predict(plan.prediction.bound, plan.prediction.gap) == plan.prediction


def test_a_plan_replaces_another_whole_or_not_at_all(plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "run" / "plan.json"
    plan.save(path)
    with path.open() as reader:  # who has opened the old one reads all of it
        replace(plan, reasons=("another",)).save(path)
        assert Plan.from_json(reader.read()) == plan
    assert Plan.load(path).reasons == ("another",)
    assert [each.name for each in path.parent.iterdir()] == ["plan.json"]
    with pytest.raises(PipelineError, match=r"cannot be written to .*plan\.json/below/plan\.json: Not a directory"):
        plan.save(path / "below" / "plan.json")


def test_auto_chooses_schedule_and_microbatches_and_says_why() -> None:
    plan = solve_plan(layers(*[1.0] * 8), Wish(ranks=2, batch=16, microbatches=(2, 4, 8)))
    worst = solve_plan(layers(*[1.0] * 8), Wish(ranks=2, stages=2, batch=16, microbatches=(2,), schedule="simple"))
    assert plan.prediction.seconds < worst.prediction.seconds
    assert plan.microbatches * plan.profile.samples == 16
    assert plan.reasons[0].startswith(plan.schedule_name)


def test_a_plan_keeps_to_the_memory_of_the_devices() -> None:
    profile = layers(*[1.0] * 8)
    wish = Wish(ranks=2, stages=2, microbatches=(8,), schedule="auto")
    free = solve_plan(profile, wish)
    limit = max(free.prediction.memory) - 1
    tight = solve_plan(profile, replace(wish, memory=limit))
    assert max(tight.prediction.memory) <= limit
    with pytest.raises(PipelineError, match=r"no schedule (fits|can be made)"):
        solve_plan(profile, replace(wish, memory=MIB))


def test_less_memory_can_be_asked_for() -> None:
    profile = layers(*[1.0] * 8)
    fast = solve_plan(profile, Wish(ranks=2, batch=32))
    lean = solve_plan(profile, Wish(ranks=2, batch=32, objective="memory"))
    assert max(lean.prediction.memory) < max(fast.prediction.memory)


def test_a_plan_is_made_anew_for_other_ranks_with_the_same_batch(plan: Plan) -> None:
    again = solve_again(plan, Wish(ranks=4, schedule="1f1b"))
    assert len(again.placement) == 4
    assert again.microbatches * again.profile.samples == plan.microbatches * plan.profile.samples
    assert again.links == make_uniform_links(4, Link(1e9, 1e-4))


def test_where_other_ranks_were_measured_the_worst_stands_for_all() -> None:
    profile = replace(
        layers(1, 1, 1, 1),
        devices=(Device(1.0, 1000 * MIB), Device(0.5, 500 * MIB)),
        links=((Link(), Link(1e9, 1e-3)), (Link(2e9, 1e-4), Link())),
    )
    plan = solve_plan(profile, Wish(ranks=4, stages=4, microbatches=(4,), schedule="1f1b"))
    assert plan.devices == (Device(0.5, 500 * MIB),) * 4
    assert plan.links == make_uniform_links(4, Link(1e9, 1e-3))


def test_a_batch_of_fewer_samples_than_ranks_is_cut_into_its_samples() -> None:
    plan = solve_plan(layers(*[1.0] * 8), Wish(ranks=4, stages=4, batch=3))
    assert (plan.microbatches, plan.profile.samples) == (3, 1)


def test_larger_microbatches_take_longer_and_weigh_more_but_have_the_same_parameters() -> None:
    node = scale_graph(layers(1.0).graph, 2.0).nodes[0]
    assert (node.forward, node.activation, node.output, node.parameters) == (2.0, 8 * MIB, 2 * MIB, MIB)


def test_actions_of_a_file_are_planned_for() -> None:
    order = parse_schedule(dump_schedule(make_schedule("1f1b", 2, 2, 4)), "mine")
    plan = solve_plan(layers(1, 1, 2), Wish(ranks=2, schedule=order))
    assert [stage.forward for stage in plan.stages.stages] == [2, 2]
    assert Plan.from_json(plan.to_json()).prove().placement == (0, 1)


def test_other_numbers_can_be_tried(plan: Plan) -> None:
    assert plan.changed(microbatches=16).prediction.seconds > plan.prediction.seconds
    assert plan.changed(speeds=(1.0, 0.5)).prediction.seconds > 1.5 * plan.prediction.seconds
    assert plan.changed(link=Link(1e6, 1.0)).prediction.seconds > plan.prediction.seconds
    assert plan.changed(schedule="zb-h1").prediction.seconds < plan.prediction.seconds
    with pytest.raises(PipelineError, match="speeds: 1 for 2 ranks"):
        plan.changed(speeds=(1.0,))


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("version", 7, "version: 7, this everstep reads 2 only"),
        ("everstep", "profile", "not a plan"),
        ("microbatches", "many", "microbatches: "),
        ("placement", [0, 1, 0], "placement: "),
        ("placement", [1, 0], "placement: "),
        ("schedule", "2f2b", "there is no schedule '2f2b'"),
        ("stage_of", {"layer.0": 0}, "'layer.1' is in no stage"),
        ("graph_hash", "0", "graph_hash: "),
        ("prediction", {"seconds": "long"}, "prediction.seconds: "),
        ("no_such_field", 1, "no_such_field"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(plan: Plan, field: str, value: object, told: str) -> None:
    with pytest.raises(PipelineError, match=told):
        Plan.from_json(json.dumps({**json.loads(plan.to_json()), field: value}))


@pytest.mark.parametrize(
    ("wish", "told"),
    [
        (Wish(ranks=2, schedule="2f2b", microbatches=(4,)), "schedule: there is no '2f2b'; there are auto, simple"),
        (Wish(ranks=2, stages=3, microbatches=(4,)), "stages: 3 are not a multiple of 2 ranks"),
        (Wish(ranks=2), "microbatches: give their number, or the batch"),
        (Wish(ranks=2, microbatches=(0,)), "microbatches: 0; there can be 1 or more"),
        (Wish(ranks=2, microbatches=(8,), batch=4), "microbatches: 8; there can be 1 to 4, the samples of a replica's"),
        (Wish(ranks=0, microbatches=(4,)), "ranks: 0"),
        (Wish(ranks=2, schedule=make_schedule("1f1b", 4, 4, 4)), "schedule: the file is for 4 ranks"),
        (Wish(ranks=8, stages=8, microbatches=(8,), schedule="1f1b"), "7 parts that can be stages, but 8 stages"),
        (Wish(ranks=2, stages=2, microbatches=(4,), schedule="1f1b", memory_weight=2.0), "memory_weight: 2.0"),
    ],
)
def test_a_wish_that_cannot_be_is_named(plan: Plan, wish: Wish, told: str) -> None:
    with pytest.raises(PipelineError, match=told):
        solve_plan(replace(plan.profile, devices=(), links=()), wish)


def test_a_plan_for_another_model_is_refused(plan: Plan) -> None:
    names = list(plan.stage_of)
    plan.check_model("", names)
    with pytest.raises(PipelineError, match=r"node 'layer.7' has no stage"):
        plan.check_model("", [*names, "layer.7"])
    with pytest.raises(PipelineError, match=r"its node 'layer.6' is not in the model"):
        plan.check_model("", names[:-1])
    ours = fingerprint_parameters([("a", (2, 3), "float32"), ("b", (3,), "float32")])
    assert ours == fingerprint_parameters([("b", (3,), "float32"), ("a", (2, 3), "float32")])
    with pytest.raises(PipelineError, match="another model"):
        replace(plan, model=ours).check_model(fingerprint_parameters([("a", (2, 4), "float32")]))


@pytest.mark.parametrize(("stages", "schedule", "memory"), [(2, "1f1b", 20), (4, "interleaved", 40), (4, "zb-v", 40)])
def test_who_has_too_little_memory_is_told_what_the_nearest_split_needs(
    stages: int, schedule: str, memory: int
) -> None:
    wish = Wish(ranks=2, stages=stages, microbatches=(4,), schedule=schedule, memory=memory * MIB)
    with pytest.raises(PipelineError, match="fits the memory") as caught:
        solve_plan(layers(*[1.0] * 8), wish)
    needs, has = re.search(r"rank [01] needs ([\d,]+) bytes .* and has ([\d,]+);", str(caught.value)).groups()  # type: ignore[union-attr]
    assert int(needs.replace(",", "")) > int(has.replace(",", "")) == memory * MIB
    assert solve_plan(layers(*[1.0] * 8), replace(wish, memory=int(needs.replace(",", "")))).prediction.seconds


def adapters(profile: Profile) -> Profile:
    """The same model, of which all but a tenth of each layer is frozen, as where low-rank adapters are trained."""
    nodes = tuple(replace(node, frozen=node.parameters * 9 // 10) for node in profile.graph.nodes)
    return replace(profile, graph=replace(profile.graph, nodes=nodes))


def test_frozen_parameters_have_neither_gradients_nor_optimizer_state_in_a_plan() -> None:
    whole = layers(*[1.0] * 8)
    wish = Wish(ranks=2, stages=2, microbatches=(8,), schedule="1f1b")
    free, lean = solve_plan(whole, wish), solve_plan(adapters(whole), wish)
    saved = 4 * 3 * (MIB * 9 // 10)  # four layers on each rank; a gradient and two moments of each frozen byte
    for most, least in zip(free.prediction.memory, lean.prediction.memory, strict=True):
        assert most - least == pytest.approx(saved, abs=100)
    assert [stage.parameters for stage in lean.stages.stages] == [4 * MIB, 4 * MIB]  # their weights are there


def test_what_fits_only_with_frozen_parameters_is_planned() -> None:
    whole = layers(*[1.0] * 8)
    wish = Wish(ranks=2, stages=2, microbatches=(8,), schedule="1f1b")
    limit = max(solve_plan(adapters(whole), wish).prediction.memory)
    assert max(solve_plan(adapters(whole), replace(wish, memory=limit)).prediction.memory) <= limit
    with pytest.raises(PipelineError, match="fits the memory"):
        solve_plan(whole, replace(wish, memory=limit))


def test_a_frozen_parameter_that_layers_share_counts_once_and_without_an_optimizer() -> None:
    nodes = (
        GraphNode("first", forward=1.0, ties=("embedding",), output=1),
        GraphNode("last", ("first",), forward=1.0, ties=("embedding",)),
    )
    graph = Graph(nodes, (("embedding", MIB),))
    wish = Wish(ranks=1, stages=1, microbatches=(1,), schedule="simple")
    assert solve_plan(Profile(graph), wish).prediction.memory == (4 * MIB,)
    assert solve_plan(Profile(replace(graph, frozen=("embedding",))), wish).prediction.memory == (MIB,)
    with pytest.raises(PipelineError, match="frozen: 'head' is no shared parameter; there are 'embedding'"):
        replace(graph, frozen=("head",))
    with pytest.raises(PipelineError, match="node 'first': 2 bytes are frozen, but its parameters are 1"):
        Graph((GraphNode("first", parameters=1, frozen=2),))


def test_a_plan_of_before_frozen_parameters_were_counted_can_still_be_read(plan: Plan) -> None:
    data = json.loads(plan.to_json())
    del data["profile"]["graph"]["frozen"]
    for node in data["profile"]["graph"]["nodes"]:
        del node["frozen"]
    assert Plan.from_json(json.dumps(data)) == plan
    assert graph_hash(layers(1.0, 2.0).graph) == "f0d5c455ffe29ed78108ac9ed40d88cc22a660fbdc4c8638b347e7051fe3bd92"
    assert graph_hash(adapters(layers(1.0, 2.0)).graph) != graph_hash(layers(1.0, 2.0).graph)
