"""Weights for stages of a model without any: the same for any number of stages, and of these stages only."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from everstep.pipeline.errors import PipelineError  # noqa: E402
from everstep.pipeline.frontend import Traced, build_tree, split_model, trace_model  # noqa: E402
from everstep.pipeline.frontend.check import run_stages  # noqa: E402
from everstep.pipeline.frontend.materialise import Seeded, materialise_stages, without_weights  # noqa: E402
from tests.pipeline.library_models import LIBRARY  # noqa: E402
from tests.pipeline.models import CASES  # noqa: E402

pytestmark = pytest.mark.torch


@cache
def _on_meta(name: str) -> Traced:
    with torch.device("meta"):
        model = CASES[name].factory()
    return trace_model(model, CASES[name].example(dtype=torch.float32).inputs)


def on_meta(name: str) -> Traced:
    return copy.deepcopy(_on_meta(name))


def weights(stages: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for stage in stages:
        for name, tensor in (*stage.module.named_parameters(), *stage.module.named_buffers()):
            assert name not in found or torch.equal(found[name], tensor)
            found[name] = tensor
    return found


@pytest.mark.parametrize("name", ["gpt", "resnet"])
def test_initial_weights_do_not_depend_on_the_number_of_stages(name: str) -> None:
    found = []
    for stages in (1, 3):
        traced = on_meta(name)
        names = [node.name for node in traced.graph.nodes if node.parameters and not node.colocate]
        cuts = {names[index * len(names) // stages]: index for index in range(1, stages)}
        made = split_model(traced, cuts)
        for stage in made:  # as on ranks of their own, in any order
            materialise_stages([stage], Seeded(traced.model, seed=3))
        found.append(weights(made))
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(tensor, found[1][key]) for key, tensor in found[0].items())


def test_another_seed_gives_other_weights() -> None:
    found = on_meta("mlp")
    (one,) = split_model(found, {})
    first, second = Seeded(found.model, 1)("0.weight"), Seeded(found.model, 2)("0.weight")
    assert not torch.equal(first, second)
    materialise_stages([one], Seeded(found.model, 1))
    assert torch.equal(dict(one.module.named_parameters())["0.weight"], first)


def test_a_state_dictionary_fills_the_stages_of_a_model_without_weights() -> None:
    case = CASES["bert"]
    real = case.build(dtype=torch.float32)
    batch = case.example(dtype=torch.float32)
    stages = split_model(on_meta("bert"), {"layers.2": 1})
    materialise_stages(stages, real.state_dict())
    assert torch.equal(run_stages(stages, batch.inputs), real(**batch.inputs))


def test_only_what_a_stage_has_is_read_and_a_tie_is_read_once() -> None:
    state = CASES["gpt"].build(dtype=torch.float32).state_dict()
    first, last = split_model(on_meta("gpt"), {"h.2": 1})
    read: list[str] = []

    def reader(name: str) -> Any:
        read.append(name)
        return state[name]

    materialise_stages([last], reader)
    assert "h.1.ln_1.weight" not in read
    assert all(parameter.device.type == "meta" for name, parameter in first.module.named_parameters() if "h.1" in name)
    read.clear()
    materialise_stages([first, last], reader)
    assert "wte.weight" in read  # the first stage's own
    stages = split_model(on_meta("gpt"), {"h.2": 1})
    read.clear()
    materialise_stages(stages, reader)
    assert read.count("wte.weight") == 1
    assert stages[0].module.wte.weight is stages[1].module.lm_head.weight


def test_optimizers_are_built_afterwards_with_groups_by_original_names() -> None:
    found = on_meta("gpt")
    _, last = split_model(found, {"h.2": 1})
    materialise_stages([last], Seeded(found.model))
    named = dict(last.module.named_parameters())
    assert {name.split(".")[0] for name in named} == {"wte", "h", "ln_f"}
    assert all(parameter.requires_grad and parameter.is_leaf for parameter in named.values())


def test_what_nobody_can_give_is_named() -> None:
    found = on_meta("llama")
    stages = split_model(found, {"layers.2": 1})
    with pytest.raises(PipelineError, match=r"nothing sets cos, sin of the model \(Llama\)"):
        materialise_stages(stages, Seeded(found.model))
    state = CASES["llama"].build(dtype=torch.float32).state_dict()  # without the rotary tables
    with pytest.raises(PipelineError, match="there is no initial value of cos"):
        materialise_stages(stages, state)


class HalfSet(torch.nn.Linear):  # type: ignore[misc, name-defined]  # torch is not where types are checked
    """A layer with more than its `reset_parameters` sets."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.scale = torch.nn.Parameter(torch.empty(3))
        self.register_buffer("seen", torch.zeros(2, dtype=torch.long))


def test_what_an_initialiser_does_not_set_is_refused_and_never_left_to_chance() -> None:
    with torch.device("meta"):
        model = torch.nn.Sequential(HalfSet())
    with pytest.raises(PipelineError, match=r"nothing sets 0\.scale, 0\.seen of 0 \(HalfSet\)"):
        Seeded(model)("0.weight")
    with without_weights():
        kept = torch.nn.Sequential(HalfSet())
    with pytest.raises(PipelineError, match=r"nothing sets 0\.scale of 0"):
        Seeded(kept)("0.weight")
    assert kept[0].scale.device.type == "meta"  # a refusal leaves the model as it was
    with torch.device("meta"):
        norm = torch.nn.Sequential(torch.nn.BatchNorm1d(3))  # with a counter, which has no NaN
    assert Seeded(norm)("0.num_batches_tracked") == 0


def test_what_a_module_around_it_sets_begins_as_in_one_process() -> None:
    with torch.device("meta"):
        attention = torch.nn.Sequential(torch.nn.MultiheadAttention(8, 2))
    real = torch.nn.MultiheadAttention(8, 2)
    drawn = Seeded(attention)
    assert torch.equal(drawn("0.out_proj.bias"), real.out_proj.bias)
    assert not drawn("0.in_proj_weight").isnan().any()
    assert drawn("0.out_proj.weight").detach().std() > 0


def test_a_model_of_transformers_begins_as_its_own_code_says() -> None:
    case = LIBRARY["llama-grouped"]
    with torch.device("meta"):
        model = case.factory()
    batch, real = case.example(dtype=torch.float32), case.build(dtype=torch.float32)
    stages = split_model(trace_model(model, batch.inputs), {"model.layers.1": 1})
    materialise_stages(stages, Seeded(model, seed=3))
    found = weights(stages)
    for name, expected in (*real.named_parameters(), *real.named_buffers()):
        if expected.dim() < 2:  # norms and rotary tables
            assert torch.equal(found[name], expected), name
        else:
            assert float(found[name].detach().std()) == pytest.approx(0.02, rel=0.3), name
    assert torch.isfinite(run_stages(stages, batch.inputs).logits).all()


def test_models_built_without_weights_keep_their_tables() -> None:
    case = CASES["llama"]
    real = case.build(dtype=torch.float32)
    with without_weights():
        model = case.factory()
    batch = case.example(dtype=torch.float32)
    stages = split_model(trace_model(model, batch.inputs), {"layers.2": 1})
    materialise_stages(stages, real.state_dict())
    assert torch.equal(run_stages(stages, batch.inputs), real(**batch.inputs))


def test_ties_survive_building_without_weights() -> None:
    with without_weights():
        model = CASES["gpt"].factory()
    assert model.lm_head.weight is model.wte.weight
    assert model.wte.weight.device.type == "meta"


def test_a_source_of_another_shape_is_refused() -> None:
    stages = split_model(build_tree(on_meta("mlp").model, [str(index) for index in range(11)]), {"5": 1})
    with pytest.raises(PipelineError, match=r"0\.weight is of shape \(16, 12\), but its source gives \(1,\)"):
        materialise_stages(stages, lambda name: torch.zeros(1))
