"""Costs of nodes, measured where they run and counted where they cannot; and times of links."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from everstep.pipeline.errors import PipelineError  # noqa: E402
from everstep.pipeline.frontend import build_tree, trace_model  # noqa: E402
from everstep.pipeline.frontend.split import node_modules  # noqa: E402
from everstep.pipeline.graph import Graph, GraphNode, Link, Profile, stage_graph  # noqa: E402
from everstep.pipeline.profile import measure_graph  # noqa: E402
from everstep.pipeline.profile_counted import count_costs  # noqa: E402
from everstep.pipeline.profile_links import combine_profiles, fit_link, measure_links, pair_ranks  # noqa: E402
from tests.checkpoint import ranks  # noqa: E402
from tests.pipeline import front  # noqa: E402
from tests.pipeline.models import CASES  # noqa: E402

pytestmark = pytest.mark.torch


def profiled(name: str, **how: Any) -> Profile:
    found = front.traced(CASES[name])
    inputs = CASES[name].example().inputs
    return measure_graph(found.graph, node_modules(found), inputs, repeats=2, warmup=1, **how)


@pytest.mark.parametrize("name", ["gpt-dropout", "resnet", "experts", "custom", "pair"])
def test_every_node_is_measured(name: str) -> None:
    found = profiled(name)
    measured = [node for node in found.graph.nodes if node.name in found.spread and node.name != "output"]
    assert len(measured) > 5
    assert all(node.forward > 0 for node in measured if node.parameters)
    assert all(node.input_grad + node.weight_grad > 0 for node in measured if node.parameters)
    assert found.samples == 4
    assert Profile.from_json(found.to_json()) == found


def test_bytes_are_those_of_the_tensors() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    inputs = {"input": torch.randn(5, 8)}
    found = trace_model(model, inputs)
    profile = measure_graph(found.graph, node_modules(found), inputs, repeats=1, warmup=0)
    first, tanh, last, _ = profile.graph.nodes
    assert (first.parameters, first.output) == (4 * (8 * 16 + 16), 4 * 5 * 16)
    assert first.activation == 4 * 5 * 8  # its input, for the gradient of its weight
    assert tanh.activation == 4 * 5 * 16  # its output
    assert last.activation == 0  # its input is what tanh keeps already
    assert last.output == 4 * 5 * 4


def test_a_module_that_takes_gradients_by_functions_is_measured() -> None:
    """torch lets nobody listen to what the graph of torch.func.jacrev keeps."""

    class Slopes(nn.Module):  # type: ignore[misc]  # torch is not where types are checked
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh())

        def forward(self, x: Any) -> Any:
            return torch.func.vmap(torch.func.jacrev(self.inner))(x).sum(2)

    model, inputs = nn.Sequential(nn.Linear(8, 8), Slopes(), nn.Linear(8, 4)), {"input": torch.randn(5, 8)}
    found = trace_model(model, inputs)
    for profile in (
        measure_graph(found.graph, node_modules(found), inputs, repeats=1, warmup=0),
        count_costs(found.graph, node_modules(found), inputs),
    ):
        assert all(node.forward > 0 and node.activation >= 0 for node in profile.graph.nodes if node.parameters)


def test_activations_are_what_the_whole_model_keeps() -> None:
    found, inputs = front.traced(CASES["gpt"]), CASES["gpt"].example().inputs
    model = found.model
    kept: dict[int, Any] = {}
    own = {parameter.data_ptr() for parameter in model.parameters()}

    def pack(tensor: Any) -> Any:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(**inputs)
    whole = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    profile = measure_graph(found.graph, node_modules(found), inputs, repeats=1, warmup=0)
    nodes = sum(node.activation for node in profile.graph.nodes)
    # Masks and positions are made once in the model, and where they are used in its nodes.
    assert whole <= nodes <= 1.1 * whole


def test_measuring_leaves_the_model_as_it_was() -> None:
    found, inputs = front.traced(CASES["resnet"]), CASES["resnet"].example().inputs
    model = found.model
    before = {name: each.clone() for name, each in model.state_dict().items()}
    weights = dict(model.named_parameters())
    grads = {name: each.grad for name, each in weights.items()}
    state = torch.get_rng_state()
    measure_graph(found.graph, node_modules(found), inputs, repeats=1)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(before[name], each) for name, each in model.state_dict().items())
    assert all(each is weights[name] and each.grad is grads[name] for name, each in model.named_parameters())


def test_measuring_keeps_no_activations() -> None:
    model = nn.Sequential(nn.Linear(7, 13), nn.Sigmoid(), nn.Linear(13, 7))  # a sigmoid keeps its own result
    inputs = {"input": torch.randn(11, 7)}
    found = trace_model(model, inputs)
    measure_graph(found.graph, node_modules(found), inputs, repeats=1, warmup=0)
    gc.collect()
    assert not [each for each in gc.get_objects() if type(each) is torch.Tensor and each.shape == (11, 13)]


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Several wait for each other, which takes longer than small layers where others use the processors too."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
def test_the_weight_gradient_of_a_wide_layer_is_found() -> None:
    model = nn.Sequential(nn.Linear(64, 1024), nn.Linear(1024, 1024), nn.ReLU())
    inputs = {"input": torch.randn(256, 64)}
    found = trace_model(model, inputs)
    profile = measure_graph(found.graph, node_modules(found), inputs, repeats=9)
    small, large, relu, _ = profile.graph.nodes
    assert large.weight_grad > relu.forward
    assert relu.weight_grad == 0.0
    assert small.input_grad == 0.0  # nobody asks for the gradient of a batch
    assert large.forward > small.forward


@pytest.mark.parametrize("name", ["gpt", "experts"])
def test_models_without_weights_are_counted(name: str) -> None:
    case = CASES[name]
    with torch.device("meta"):
        model = case.factory().double()
    inputs = case.example().inputs
    found = trace_model(model, inputs)
    counted = count_costs(found.graph, node_modules(found), inputs).graph
    measured = profiled(name).graph
    assert [node.name for node in counted.nodes] == [node.name for node in measured.nodes]
    for one, other in zip(counted.nodes, measured.nodes, strict=True):
        assert (one.parameters, one.output) == (other.parameters, other.output)
        # What an expert is sent depends on the data.
        assert one.activation == other.activation or "experts" in one.name
    stage_graph(counted, {node.name: 0 for node in counted.nodes})


def test_arithmetic_is_counted_by_its_formulas() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4096, 4096, bias=False), nn.Linear(4096, 8192, bias=False))
    inputs = {"input": torch.empty(8192, 4096, device="meta")}
    found = trace_model(model, inputs)
    first, second, _ = count_costs(found.graph, node_modules(found), inputs).graph.nodes
    assert second.forward == pytest.approx(2 * first.forward, rel=0.01)
    assert second.input_grad == pytest.approx(second.forward, rel=0.01)
    assert first.input_grad == 0.0
    for node in (first, second):  # added to that of the micro-batch before
        assert node.weight_grad == pytest.approx(node.forward, rel=0.04)


def test_blocks_of_a_tree_are_measured_too() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    found = build_tree(model)
    profile = measure_graph(found.graph, found.node_modules(), {"input": torch.ones(3, 4)}, repeats=1)
    assert [node.output for node in profile.graph.nodes] == [48, 0]
    assert profile.graph.nodes[0].forward > 0


def test_every_pair_meets_once_and_nobody_has_two_peers() -> None:
    for world in range(2, 9):
        found = list(pair_ranks(world))
        pairs = [pair for pairs in found for pair in pairs]
        assert sorted(pairs) == [(a, b) for a in range(world) for b in range(a + 1, world)]
        assert all(len({rank for pair in each for rank in pair}) == 2 * len(each) for each in found)


def test_a_link_follows_from_two_round_trips() -> None:
    found = fit_link(2 * (1e-3 + 1000 / 1e6), 2 * (1e-3 + 100_000 / 1e6), 1000, 100_000)
    assert found.bandwidth == pytest.approx(1e6)
    assert found.latency == pytest.approx(1e-3)


def _links(rank: int) -> Any:
    return measure_links(repeats=3, large=1 << 20)


def test_links_of_all_pairs_are_known_to_all() -> None:
    found = ranks.run(3, _links)
    assert found[0] == found[1] == found[2]
    for one in range(3):
        for other in range(3):
            if one != other:
                assert 1e5 < found[0][one][other].bandwidth < 1e12
                assert 0 <= found[0][one][other].latency < 1
                assert 0 <= found[0][one][other].held <= 1


def test_ranks_profiles_become_one() -> None:
    def made(seconds: float) -> Profile:
        return Profile(Graph((GraphNode("a", forward=seconds, input_grad=seconds),)), spread={"a": seconds})

    links = ((Link(), Link(1.0)), (Link(2.0), Link()))
    found = combine_profiles([made(1.0), made(2.0), made(4.0)], links)
    assert found.graph.nodes[0].forward == 2.0
    assert [device.speed for device in found.devices] == [2.0, 1.0, 0.5]
    assert (found.links, found.spread) == (links, {"a": 4.0})
    with pytest.raises(PipelineError, match="different models"):
        combine_profiles([made(1.0), Profile(Graph((GraphNode("b"),)))])
