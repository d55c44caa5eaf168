"""A stage on a device draws alike, again and again, from the device's random numbers and from the processor's."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest

pytest.importorskip("torch")
import torch
import torch.distributed as dist

from everstep.pipeline import joining, profile
from everstep.pipeline.engine import rng
from everstep.pipeline.engine.generators import LinkedGenerators, generators_of
from everstep.pipeline.engine.options import EngineOptions
from everstep.pipeline.graph import Graph
from everstep.pipeline.transport.base import Transport
from everstep.pipeline.transport.devices import with_index
from tests.pipeline.inprocess import Fabric
from tests.pipeline.training import Setting, batch_of, engine_of

pytestmark = pytest.mark.torch


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> torch.Generator:
    """The generator of a device that is pretended, beside the processor's."""
    found = torch.Generator()
    monkeypatch.setattr(rng, "generators_of", lambda _: [found, torch.default_generator])
    return found


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_recomputation_draws_the_same_on_the_device_and_on_the_processor(
    schedule: str, device: torch.Generator
) -> None:
    def noisy(module: Any, given: Any) -> Any:
        return (given[0] * torch.rand(1, generator=device).item() * torch.rand(1).item(),)

    def gradients(recompute: frozenset[int]) -> list[dict[str, Any]]:
        def work(transport: Transport) -> dict[str, Any]:
            setting = Setting("gpt-dropout", schedule, steps=1, options=EngineOptions(recompute=recompute))
            engine, batch = engine_of(setting, transport), batch_of(setting, 0)
            for stage in engine._stages.values():
                for module in stage.module.module.modules():
                    if isinstance(module, torch.nn.LayerNorm):
                        module.register_forward_pre_hook(noisy)
            engine.step(batch.inputs, batch.targets)
            return {name: parameter.grad for name, parameter in engine.parameters.named.items()}

        device.manual_seed(len(recompute))  # where it was before must not matter
        return Fabric(2).run(work)

    for plain, again in zip(gradients(frozenset()), gradients(frozenset({0, 1})), strict=True):
        for name, gradient in plain.items():
            assert torch.equal(gradient, again[name]), name


def test_a_module_that_is_known_to_draw_is_seeded_and_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[int] = []

    class Counted(LinkedGenerators):
        def get_state(self) -> tuple[Any, ...]:
            copies.append(1)
            return super().get_state()

        def stands_at(self, state: Any) -> bool:
            copies.append(1)
            return super().stands_at(state)

    monkeypatch.setattr(rng, "LinkedGenerators", Counted)
    model = torch.nn.Sequential(*(torch.nn.Dropout(0.5) for _ in range(20)))
    random = rng.Random(dict(model.named_modules()), torch.device("cpu"), 1)
    for _ in range(2):
        copies.clear()
        with random.kept(), random.of(0):
            model(torch.ones(8))
        random.next_step()
    random.close()
    assert len(copies) <= 3  # before the micro-batch, and whether the code around the modules has drawn


def test_a_module_that_is_called_more_often_than_the_trace_did_draws_others_in_each_call() -> None:
    """As one dropout of the experts between which data chooses, and of layers in other stages."""
    dropout = torch.nn.Dropout(0.5)
    random = rng.Random({"dropout": dropout}, torch.device("cpu"), seed=1)
    masks = list[Any]()
    random.next_step()
    for stage, numbers in enumerate([(0, 2), (1,)]):
        with random.kept(), random.of(0, {"dropout": numbers}, stage):
            masks += [dropout(torch.ones(64)) for _ in range(3)]
    random.close()
    assert not any(torch.equal(one, other) for one, other in combinations(masks, 2))


def test_the_generators_of_a_device_are_put_back_together(device: torch.Generator) -> None:
    both = LinkedGenerators([device, torch.default_generator])
    both.manual_seed(7)
    before = both.get_state()
    drawn = [torch.rand(1, generator=each) for each in (device, torch.default_generator)]
    assert drawn[0] == drawn[1]
    assert not both.stands_at(before)
    device.set_state(before[0])
    assert not both.stands_at(before)  # one of them alone is not enough
    both.set_state(before)
    assert both.stands_at(before)
    assert both.initial_seed() == 7


def test_a_device_without_a_number_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "default_generators", tuple(torch.Generator() for _ in range(4)))
    assert with_index("cuda") == torch.device("cuda", 3)
    assert with_index(torch.device("cuda", 1)) == torch.device("cuda", 1)
    assert with_index("cpu") == torch.device("cpu")
    assert generators_of(torch.device("cuda")) == [torch.cuda.default_generators[3], torch.default_generator]
    assert generators_of(torch.device("cpu")) == [torch.default_generator]
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    here = joining.find_place(None, {}, "cuda", None, None, "cluster")  # type: ignore[arg-type]  # nothing is said
    assert here.device == torch.device("cuda", 3)


def test_a_measurement_on_a_device_without_a_number_leaves_the_current_one_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Enough(Exception):
        """Nothing is to run there."""

    forked: list[Any] = []

    def fork(devices: list[int]) -> Any:
        forked.append(devices)
        raise Enough

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.random, "fork_rng", fork)
    monkeypatch.setattr(profile, "of_nothing", lambda *_: None)
    with pytest.raises(Enough):
        profile.measure_graph(Graph(()), {}, {}, device="cuda")
    assert forked == [[3]]
