"""Scripts in the shape of the public samples come to what one process comes to: an image classifier and a GPT."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from tests.checkpoint.ranks import run  # noqa: E402


class Classifier(nn.Module):  # type: ignore[misc]
    """As in the MNIST sample, smaller."""

    def __init__(self) -> None:
        super().__init__()
        self.net1 = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 8, 3), nn.MaxPool2d(2), nn.Flatten())
        self.net2 = nn.Sequential(nn.Linear(200, 16), nn.ReLU(), nn.Linear(16, 10))

    def forward(self, x: Any) -> Any:
        return F.log_softmax(self.net2(self.net1(x)), 1)


class Block(nn.Module):  # type: ignore[misc]
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        # A bias of keys has no gradient but rounding, which AdamW makes as large as any other.
        self.attention = nn.Linear(width, 3 * width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Any) -> Any:
        q, k, v = self.attention(self.norm(x)).chunk(3, -1)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.mlp(x)


class Gpt(nn.Module):  # type: ignore[misc]
    """With the embedding's weight in the head, too."""

    def __init__(self, words: int = 17, width: int = 8, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.h = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input_ids: Any) -> Any:
        x = self.embed(input_ids)
        for block in self.h:
            x = block(x)
        return self.head(x)


def digits(seed: int) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(8, 1, 14, 14, generator=generator, dtype=torch.float64)
    return images, torch.randint(10, (8,), generator=generator)


def words(seed: int) -> tuple[Any, Any]:
    ids = torch.randint(17, (8, 7), generator=torch.Generator().manual_seed(seed))
    return ids[:, :-1], ids[:, 1:]


def negative_log(output: Any, target: Any) -> Any:
    return F.nll_loss(output, target)


def next_word(output: Any, target: Any) -> Any:
    return F.cross_entropy(output.reshape(-1, output.shape[-1]), target.reshape(-1))


SCRIPTS: dict[str, tuple[Callable[[], Any], Callable[[int], tuple[Any, Any]], Callable[[Any, Any], Any]]] = {
    "mnist": (Classifier, digits, negative_log),
    "gpt": (Gpt, words, next_word),
}
STEPS = 3


def fresh(name: str) -> Any:
    torch.manual_seed(0)
    return SCRIPTS[name][0]().double()


def alone(name: str) -> tuple[list[float], dict[str, Any]]:
    _, batch, loss_of = SCRIPTS[name]
    model = fresh(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        data, target = batch(step)
        optimizer.zero_grad()
        loss = loss_of(model(data), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


def script(rank: int, name: str, config: dict[str, Any], folder: str, upto: int = STEPS, resume: bool = False) -> Any:
    """As the public samples are written."""
    from everstep.compat import install

    install()
    import smdistributed.modelparallel.torch as smp  # type: ignore[import-not-found]

    _, batch, loss_of = SCRIPTS[name]
    smp.init(config)

    @smp.step  # type: ignore[untyped-decorator]
    def train_step(model: Any, data: Any, target: Any) -> Any:
        output = model(data)
        loss = loss_of(output, target)
        model.backward(loss)
        return output, loss

    @smp.step  # type: ignore[untyped-decorator]
    def test_step(model: Any, data: Any, target: Any) -> Any:
        output = model(data)
        return loss_of(output, target)

    with smp.model_creation():
        model = fresh(name)
    model = smp.DistributedModel(model)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=100)
    first = smp.resume_from_checkpoint(folder)["step"] if resume else 0
    losses = []
    for step in range(first, upto):
        data, target = batch(step)
        mine = slice(smp.dp_rank(), None, smp.dp_size())
        model.train()
        optimizer.zero_grad()
        output, loss = train_step(model, data[mine], target[mine])
        assert output.concat().shape[0] == len(data[mine])
        optimizer.step()
        scheduler.step()
        losses.append(sum(smp.allgather(loss.reduce_mean().item(), smp.DP_GROUP)) / smp.dp_size())
    model.eval()
    data, target = batch(0)
    evaluated = test_step(model, data, target).reduce_mean().item()
    smp.save_checkpoint(folder, tag=f"s{upto}", model=model, optimizer=optimizer, user_content={"step": upto})
    local = sum(1 for _ in model.local_parameters())
    kept = optimizer.local_state_dict() if config.get("shard_optimizer_state") else optimizer.state_dict()
    return losses, model.state_dict(), evaluated, local, smp.pp_size(), sorted(kept["state"])


@pytest.mark.parametrize(
    ("name", "config", "world"),
    [
        ("mnist", {"partitions": 2, "microbatches": 4}, 2),
        ("gpt", {"pipeline_parallel_degree": 2, "microbatches": 2, "pipeline": "simple", "ddp": True}, 4),
    ],
)
def test_a_script_comes_to_what_one_process_comes_to(
    name: str, config: dict[str, Any], world: int, tmp_path: Path
) -> None:
    losses, weights = alone(name)
    for found, state, evaluated, local, size, kept in run(world, script, name, config, str(tmp_path), timeout=110):
        assert found == pytest.approx(losses, rel=1e-10)
        assert state.keys() == weights.keys()
        for each, value in weights.items():
            torch.testing.assert_close(state[each], value, rtol=1e-10, atol=1e-12)
        assert 0 < local < len(list(fresh(name).parameters()))
        assert size == 2
        assert kept == list(range(len(list(fresh(name).parameters()))))
        model = fresh(name)
        model.load_state_dict(weights)
        data, target = SCRIPTS[name][1](0)
        assert evaluated == pytest.approx(SCRIPTS[name][2](model(data), target).item(), rel=1e-10)


@pytest.mark.parametrize(
    ("more", "world", "optimizers"),
    [
        ({}, 2, ["0", "1"]),
        ({"ddp": True, "shard_optimizer_state": True}, 4, ["0_0", "0_1", "1_0", "1_1"]),
    ],
)
def test_a_script_goes_on_from_its_checkpoint(
    more: dict[str, Any], world: int, optimizers: list[str], tmp_path: Path
) -> None:
    losses, weights = alone("gpt")
    config = {"partitions": 2, "microbatches": 2, **more}
    run(world, script, "gpt", config, str(tmp_path), 1, timeout=110)
    assert (tmp_path / "newest").read_text() == "s1"
    assert {each.name for each in (tmp_path / "s1_partial").iterdir()} == {
        "model_0.pt",
        "model_1.pt",
        *(f"optimizer_{each}.pt" for each in optimizers),
        "user_content.pt",
    }
    states = set()
    for found, state, _, _, _, kept in run(world, script, "gpt", config, str(tmp_path), STEPS, True, timeout=110):
        assert found == pytest.approx(losses[1:], rel=1e-10)
        for each, value in weights.items():
            torch.testing.assert_close(state[each], value, rtol=1e-10, atol=1e-12)
        states.add(tuple(kept))
    assert len(states) == (4 if "shard_optimizer_state" in more else 1), "each replica keeps its share of the state"


def talk(rank: int) -> Any:
    from everstep.compat.smdistributed.modelparallel import torch as smp

    smp.init({"partitions": 2, "ddp": True, "placement_strategy": "spread"})
    if smp.rank() == 0:
        smp.broadcast({"from": 0}, smp.CommGroup.WORLD)
        heard = {"from": 0}
    else:
        heard = smp.recv_from(0, smp.RankType.WORLD_RANK)
    if smp.pp_rank() == 0:
        smp.send(("stage", smp.dp_rank()), 1, smp.RankType.MP_RANK)
        passed = None
    else:
        passed = smp.recv_from(0, smp.RankType.MP_RANK)
    smp.barrier()
    smp.mp_barrier()
    smp.dp_barrier()
    return (
        (smp.pp_rank(), smp.dp_rank(), smp.tp_size()),
        smp.get_mp_group(),
        heard,
        passed,
        smp.allgather(rank, smp.DP_GROUP),
    )


def test_ranks_groups_and_messages() -> None:
    found = run(4, talk)
    # spread is TPD: neighbouring processes are replicas
    assert [each[0] for each in found] == [(0, 0, 1), (0, 1, 1), (1, 0, 1), (1, 1, 1)]
    assert [each[1] for each in found] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert all(each[2] == {"from": 0} for each in found)
    assert [each[3] for each in found] == [None, None, ("stage", 0), ("stage", 1)]
    assert [each[4] for each in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
