"""Objects in a checkpoint: their names do not depend on wrappers, and they are restored without loss."""

from __future__ import annotations

import random
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper  # noqa: E402
from torch.distributed.checkpoint.state_dict import get_model_state_dict  # noqa: E402

from everstep.checkpoint.errors import CheckpointError  # noqa: E402
from everstep.checkpoint.format.manifest import StoredTensor  # noqa: E402
from everstep.checkpoint.format.values import UnsupportedValue  # noqa: E402
from everstep.checkpoint.state.flat import Flat, bind_kinds, flatten_objects  # noqa: E402
from everstep.checkpoint.state.kinds import PerRank, Saved, dtype_name  # noqa: E402
from everstep.checkpoint.state.rng import Rng  # noqa: E402

pytestmark = pytest.mark.torch


class Net(nn.Module):  # type: ignore[misc]  # torch is not where types are checked
    """A tied weight, a buffer, a submodule and an extra state: each is a special case somewhere."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, width)
        self.body = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width))
        self.head = nn.Linear(width, 8, bias=False)
        self.head.weight = self.embed.weight
        self.seen = 0

    def forward(self, tokens: Any) -> Any:
        self.seen += 1
        return self.head(self.body(self.embed(tokens)))

    def get_extra_state(self) -> dict[str, Any]:
        return {"seen": self.seen, "history": [torch.tensor([self.seen])]}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"] + int(state["history"][0]) * 0


def trained(seed: int, steps: int = 3) -> tuple[Net, Any, Any]:
    torch.manual_seed(seed)
    net = Net()
    decay = [p for p in net.parameters() if p.ndim > 1]
    rest = [p for p in net.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": rest}], lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.randint(0, 8, (6,))).square().mean().backward()
        optimizer.step()
        scheduler.step()
    return net, optimizer, scheduler


def restore(flat: Flat, objects: dict[str, object], *, rank: int = 0) -> list[str]:
    """Loads a flat state as a restore does, without files; returns what does not fit."""
    saved = Saved(
        "", {n: StoredTensor(dtype_name(t.dtype), tuple(t.shape), ()) for n, t in flat.tensors.items()}, flat.values
    )
    copies = {name: tensor.clone() for name, tensor in flat.tensors.items()}
    problems: list[str] = []
    kinds = bind_kinds(objects, rank=rank)
    targets = [kind.targets(saved.below(kind.prefix), problems) for kind in kinds]
    if not problems:
        for kind, found in zip(kinds, targets, strict=True):
            # What is nobody's yet stays where it was read.
            loaded = {name: copies[name] if held.is_meta else held.copy_(copies[name]) for name, held in found.items()}
            kind.load(saved.below(kind.prefix), loaded)
    return problems


def equal(one: Flat, other: Flat) -> bool:
    return (
        one.values == other.values
        and one.tensors.keys() == other.tensors.keys()
        and all(torch.equal(one.tensors[name], other.tensors[name]) for name in one.tensors)
    )


def objects(seed: int, steps: int) -> dict[str, object]:
    net, optimizer, scheduler = trained(seed, steps)
    return {"model": net, "optimizer": optimizer, "scheduler": scheduler}


@pytest.mark.parametrize("steps", [0, 2], ids=["fresh", "used"])
def test_model_optimizer_and_scheduler_come_back_bit_for_bit(steps: int) -> None:
    before = objects(1, 3)
    flat = flatten_objects(before, rank=0)
    after = objects(2, steps)
    assert restore(flat, after) == []
    assert equal(flatten_objects(after, rank=0), flat)
    # And they go on alike, so nothing that counts was left out.
    for each in (before, after):
        torch.manual_seed(7)
        net: Any = each["model"]
        optimizer: Any = each["optimizer"]
        optimizer.zero_grad()
        net(torch.randint(0, 8, (6,))).square().mean().backward()
        optimizer.step()
    assert equal(flatten_objects(before, rank=0), flatten_objects(after, rank=0))


def test_names_are_those_of_torch() -> None:
    net, _, _ = trained(1)
    names = set(flatten_objects({"model": net}, rank=0).tensors)
    theirs = {f"model.{name}" for name in get_model_state_dict(net) if not name.endswith("_extra_state")}
    assert names == theirs | {"model._extra_state.history.[0]"}


def test_a_compiled_module_has_the_names_of_the_plain_one() -> None:
    net, optimizer, _ = trained(1)
    plain = flatten_objects({"model": net, "optimizer": optimizer}, rank=0)
    assert equal(flatten_objects({"model": torch.compile(net), "optimizer": optimizer}, rank=0), plain)
    other, other_optimizer, _ = trained(2)
    assert restore(plain, {"model": torch.compile(other), "optimizer": other_optimizer}) == []
    assert equal(flatten_objects({"model": other, "optimizer": other_optimizer}, rank=0), plain)


def test_looking_at_an_optimizer_changes_nothing() -> None:
    net, optimizer, _ = trained(1, steps=0)
    flatten_objects({"model": net, "optimizer": optimizer}, rank=0)
    assert not optimizer.state, "torch's own get_optimizer_state_dict would have taken a step"


def test_state_of_more_bits_than_its_parameter_keeps_them() -> None:
    def make(seed: int) -> dict[str, object]:
        torch.manual_seed(seed)
        net = nn.Linear(3, 3).bfloat16()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        for param in net.parameters():
            optimizer.state[param]["momentum_buffer"] = torch.rand(param.shape, dtype=torch.float32)
        return {"model": net, "optimizer": optimizer}

    flat = flatten_objects(make(1), rank=0)
    after = make(2)
    assert restore(flat, after) == []
    assert equal(flatten_objects(after, rank=0), flat)


def test_stages_of_a_pipeline_have_names_of_the_whole_model() -> None:
    whole = nn.ModuleDict({str(i): nn.Linear(2, 2) for i in range(4)})
    optimizer = torch.optim.Adam(whole.parameters())
    for param in whole.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    flat = flatten_objects({"model": whole, "optimizer": optimizer}, rank=0)
    for held in (["0", "1"], ["2"], ["3", "0"]):
        stages = [nn.ModuleDict({name: nn.Linear(2, 2)}) for name in held]
        own = torch.optim.Adam([p for stage in stages for p in stage.parameters()])
        assert restore(flat, {"model": stages, "optimizer": own}) == []
        mine = flatten_objects({"model": stages, "optimizer": own}, rank=0)
        assert all(torch.equal(tensor, flat.tensors[name]) for name, tensor in mine.tensors.items())
        assert len(mine.tensors) == len(held) * 8


def test_a_stage_without_a_parameter_of_a_group_has_the_group_s_options_too() -> None:
    """Else its scheduler goes on from another learning rate than those of the other stages."""

    def make(held: str) -> tuple[dict[str, object], Any]:
        stages = [nn.ModuleDict({name: nn.Linear(2, 2)}) for name in held]
        rates = {"a": 0.01, "b": 0.1, "c": 1.0}
        params = {name: [each for stage in stages if name in stage for each in stage.parameters()] for name in rates}
        optimizer = torch.optim.SGD([{"params": params[name], "lr": rates[name]} for name in rates], lr=9.0)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        return {"model": stages, "optimizer": optimizer, "scheduler": scheduler}, optimizer

    before, optimizer = make("abc")
    for group in optimizer.param_groups:
        group["lr"] /= 2
    flat = flatten_objects(before, rank=0)
    for held in ("a", "bc", "cb"):
        after, optimizer = make(held)
        assert restore(flat, after) == []
        assert [group["lr"] for group in optimizer.param_groups] == [0.005, 0.05, 0.5]
        assert [len(group["params"]) for group in optimizer.param_groups] == [2 * (name in held) for name in "abc"]


def test_a_place_at_which_stages_had_different_options_says_nothing_of_an_empty_group() -> None:
    nets = [nn.ModuleDict({name: nn.Linear(2, 2)}) for name in "ab"]
    rates = {"a": 0.01, "b": 0.1}
    every = [
        flatten_objects({"model": net, "optimizer": torch.optim.SGD([*net.parameters()], lr=rates[name])}, rank=0)
        for net, name in zip(nets, "ab", strict=True)
    ]
    both = Flat(every[0].tensors | every[1].tensors, every[0].values | every[1].values)
    empty = torch.optim.SGD([{"params": []}], lr=5.0)
    assert restore(both, {"model": nets, "optimizer": empty}) == []
    assert [group["lr"] for group in empty.param_groups] == [5.0]


def actor_and_critic() -> dict[str, object]:
    actor, critic = nn.Sequential(nn.Linear(3, 3)), nn.Sequential(nn.Linear(3, 3))
    optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()])
    critic(actor(torch.rand(2, 3))).sum().backward()
    optimizer.step()
    return {"actor": actor, "critic": critic, "optimizer": optimizer}


def test_one_optimizer_may_train_two_models_whose_parameters_have_the_same_names() -> None:
    flat = flatten_objects(actor_and_critic(), rank=0)
    after = actor_and_critic()
    assert restore(flat, after) == []
    assert equal(flatten_objects(after, rank=0), flat)


def test_layers_that_are_computed_again_in_the_backward_pass_have_their_plain_names() -> None:
    def made(*, wrapped: bool, compiled: bool = False) -> dict[str, object]:
        net = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3)))
        if compiled:
            net[1][0] = torch.compile(net[1][0])
        if wrapped:
            net[1] = checkpoint_wrapper(net[1])
        optimizer = torch.optim.Adam(net.parameters())
        for parameter in net.parameters():
            parameter.grad = torch.rand_like(parameter)
        optimizer.step()
        return {"model": net, "optimizer": optimizer}

    flat = flatten_objects(made(wrapped=False), rank=0)
    for after in (made(wrapped=True), made(wrapped=True, compiled=True)):
        assert restore(flat, after) == []
        assert equal(flatten_objects(after, rank=0), flat)


@pytest.mark.parametrize("value", [3, 0.5, "name", None, (1, 2)])
def test_a_value_that_can_never_change_is_refused(value: object) -> None:
    with pytest.raises(CheckpointError, match=r"epoch: a .* would be saved as that for ever.*state=\{'epoch': …\}"):
        flatten_objects({"epoch": value}, rank=0)


def test_plain_values_come_back_in_place() -> None:
    weights, history, best = torch.rand(3), {"loss": [0.5, 0.25]}, [1, 2]
    flat = flatten_objects({"weights": weights, "history": history, "best": best}, rank=0)
    kept = weights.clone()
    flat.tensors["weights"] = kept
    weights.zero_()
    history["loss"] = []
    best.clear()
    assert restore(flat, {"weights": weights, "history": history, "best": best}) == []
    assert torch.equal(weights, kept)
    assert (history, best) == ({"loss": [0.5, 0.25]}, [1, 2])


def test_an_object_may_hold_tensors_that_a_fresh_one_does_not() -> None:
    class Average:
        def __init__(self, shadow: list[Any]) -> None:
            self.shadow = shadow

        def state_dict(self) -> dict[str, Any]:
            return {"shadow": self.shadow, "decay": 0.9}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.shadow = state["shadow"]

    flat = flatten_objects({"ema": Average([torch.rand(2), torch.rand(3)])}, rank=0)
    fresh = Average([])
    assert restore(flat, {"ema": fresh}) == []
    assert equal(flatten_objects({"ema": fresh}, rank=0), flat)


def test_generators_draw_what_they_would_have_drawn() -> None:
    def draw() -> list[Any]:
        return [random.random(), np.random.rand(), torch.rand(1).item()]

    flat = flatten_objects({"rng": PerRank(Rng())}, rank=3)
    assert set(flat.tensors) == {"rank.3.rng.states"}, "one tensor for each rank, whatever generators there are"
    expected = draw()
    draw()
    assert restore(flat, {"rng": PerRank(Rng())}, rank=3) == []
    assert draw() == expected


def test_what_does_not_fit_is_named_before_anything_is_touched() -> None:
    net, optimizer, _ = trained(1)
    flat = flatten_objects({"model": net, "optimizer": optimizer}, rank=0)
    wide = Net(width=5)
    before = {name: tensor.clone() for name, tensor in wide.state_dict().items() if isinstance(tensor, torch.Tensor)}
    problems = restore(flat, {"model": wide})
    assert "model.body.0.weight has shape [4, 4] in the checkpoint, [5, 5] here" in problems
    assert all(torch.equal(wide.state_dict()[name], tensor) for name, tensor in before.items())
    other_type = restore(flat, {"model": Net().bfloat16()})[0]
    assert other_type.endswith("is float32 in the checkpoint, bfloat16 here (cast=True casts it)")
    assert restore(flat, {"model": nn.Linear(1, 1)})[0] == "model.weight is not in the checkpoint"
    with torch.device("meta"):
        assert "meta device" in restore(flat, {"model": Net()})[0]


def test_what_cannot_be_saved_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedValue, match=r"hook"):
        flatten_objects({"hook": {"f": print}}, rank=0)
    with pytest.raises(CheckpointError, match=r"rank"):
        flatten_objects({"rank": 1}, rank=0)
    with pytest.raises(CheckpointError, match=r"sparse"):
        flatten_objects({"sparse": torch.eye(2).to_sparse()}, rank=0)


def test_the_state_of_an_object_that_follows_the_step_is_that_of_the_step() -> None:
    class Follower:
        step = 9  # where a loader that reads ahead is

        def state_at(self, step: int) -> dict[str, int]:
            return {"step": step}

        def state_dict(self) -> dict[str, int]:
            return self.state_at(self.step)

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.step = state["step"]

    assert flatten_objects({"sampler": Follower()}, rank=0, step=7).values["sampler.step"] == 7
