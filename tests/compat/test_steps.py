"""Step functions as scripts have them: what is told of micro-batches, and what is not one tensor after another."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.utils import _pytree as pytree  # noqa: E402

from everstep.pipeline.errors import PipelineError  # noqa: E402
from tests.checkpoint.ranks import run  # noqa: E402


class Net(nn.Module):  # type: ignore[misc]  # torch is not where types are checked
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Any, extra: Any, *, scale: Any = 1.0, **rest: Any) -> Any:
        h = torch.relu(self.b(torch.tanh(self.a(x)) + extra["add"] * extra["more"][0]))
        return {"logits": self.c(h * rest["gate"]) * scale, "hidden": h}


def batch(seed: int, world: int = 1, rank: int = 0) -> tuple[Any, Any, Any, Any]:
    """Inputs, two nested ones, targets, and a gate of which the samples are the second dimension."""
    generator = torch.Generator().manual_seed(seed)
    normal = functools.partial(torch.randn, generator=generator, dtype=torch.float64)
    whole = normal(8, 4), {"add": normal(8, 8), "more": (normal(8, 8),)}, torch.randint(3, (8,), generator=generator)
    x, extra, y = pytree.tree_map(lambda each: each[rank::world], whole)
    return x, extra, y, normal(1, 8)[:, rank::world]


def fresh() -> tuple[Any, Any]:
    torch.manual_seed(0)
    net = Net().double()
    return net, torch.optim.SGD(net.parameters(), lr=0.1)


def backprop(model: Any, loss: Any) -> None:
    model.backward(loss)


def steps(rank: int, folder: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return the results of a rank, for several ways to train."""
    from everstep.compat.smdistributed.modelparallel import torch as smp

    options = dict(options)
    shards = {"shard_optimizer_state": True} if options.pop("shards", False) else {}
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2, "ddp": True, **shards})

    @smp.step(non_split_inputs=["whole"], input_split_axes={"gate": 1})
    def train(model: Any, x: Any, extra: Any, y: Any, gate: Any, whole: Any, scale: Any) -> Any:
        out = model(x, extra, scale=scale, gate=gate.t())
        loss = F.cross_entropy(out["logits"], y) * whole.sum()
        backprop(model, loss)
        return {"loss": loss, "rest": [out["logits"], len(x), None]}, loss.item()

    net, optimizer = fresh()
    with pytest.raises(PipelineError, match="module '1' is a SyncBatchNorm"):
        smp.DistributedModel(nn.Sequential(net, nn.SyncBatchNorm(4)))
    model = smp.DistributedModel(net, **options)
    for layer in (net.b, net.c) if options else ():
        smp.set_activation_checkpointing(layer)
    optimizer = smp.DistributedOptimizer(optimizer, static_loss_scale=None, dynamic_loss_args={"scale_window": 9})
    hooked: list[Any] = []
    model.register_post_partition_hook(lambda *given: hooked.append(given))
    told: Any = None
    for seed in range(4):
        if not seed % 2:
            optimizer.zero_grad()
        x, extra, y, gate = batch(seed, smp.dp_size(), smp.dp_rank())
        told = train(model, x, extra, y, gate, torch.ones(2), torch.tensor(1.0 + seed))
        if seed % 2:
            norm = optimizer.clip_master_grads(0.5)
            optimizer.step()
    losses, rest = told[0]["loss"], told[0]["rest"]
    assert rest[0].concat().shape == (len(x), 3)
    assert rest[1:] == [[2, 2], None]
    assert told[1] == [each.item() for each in losses]
    assert hooked == [(model, optimizer)]
    with pytest.raises(Exception, match="'scale' was a tensor"):
        train(model, x, extra, y, gate, torch.ones(2), 0.5)
    if smp.dp_rank() == 0:
        smp.save({"model": model.local_state_dict()}, f"{folder}/part.pt")
    return {"weights": model.state_dict(), "norm": norm, "loss": losses.reduce_mean().item()}


@pytest.mark.parametrize("options", [{}, {"backward_passes_per_step": 2}, {"shards": True}])
def test_steps_come_to_what_one_process_comes_to(options: dict[str, Any], tmp_path: Path) -> None:
    net, optimizer = fresh()
    for seed in range(4):
        if not seed % 2:
            optimizer.zero_grad()
        x, extra, y, gate = batch(seed)
        loss = F.cross_entropy(net(x, extra, scale=1.0 + seed, gate=gate.t())["logits"], y) * 2
        loss.backward()
        if seed % 2:
            norm = nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
    found = run(4, steps, str(tmp_path), options, timeout=110)
    assert sum(each["loss"] for each in found) / 4 == pytest.approx(loss.item(), rel=1e-10)
    for each in found:
        assert each["norm"] == pytest.approx(norm.item(), rel=1e-10)
        for name, value in net.state_dict().items():
            torch.testing.assert_close(each["weights"][name], value, rtol=1e-10, atol=1e-12)
    again = run(2, elsewhere, str(tmp_path), timeout=110)
    for name, value in net.state_dict().items():
        torch.testing.assert_close(again[1][name], value, rtol=1e-10, atol=1e-12)


def elsewhere(rank: int, folder: str) -> Any:
    """The parts of a checkpoint, in other stages; then all of it on each process."""
    from everstep.compat.smdistributed.modelparallel import torch as smp

    smp.init({"partitions": 2, "microbatches": 2, "auto_partition": False, "default_partition": 0})

    @smp.step
    def look(model: Any, x: Any, extra: Any, gate: Any) -> Any:
        return model(x, extra, gate=gate)["logits"]

    with smp.delay_param_initialization():
        net, _ = fresh()
    smp.set_partition(net.b, 1)  # c is not placed, and goes where what it uses is
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    model.load_state_dict(smp.load(f"{folder}/part.pt")["model"])
    x, extra, _, gate = batch(0)
    look(model, x, extra, gate.t())
    assert {node: stage for node, stage in model.stage_of.items() if node in "abc"} == {"a": 0, "b": 1, "c": 1}
    assert optimizer.param_groups[0]["params"] == list(model.local_parameters()), "made for those without data"
    with pytest.raises(RuntimeError, match="the model has no d"):
        model.load_state_dict({**model.state_dict(), "d": torch.ones(1)})
    model.cpu()
    return net.state_dict()
