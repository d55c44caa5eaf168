"""Pipelines as scripts see them: a model is cut, trains as with DDP, and goes on elsewhere from its checkpoint."""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import signal
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import everstep  # noqa: E402
from everstep.coordination.errors import RankLost  # noqa: E402
from everstep.pipeline import EngineOptions, LayoutOptions, pipeline, stage  # noqa: E402
from everstep.pipeline.errors import PipelineError  # noqa: E402
from everstep.pipeline.frontend.materialise import Seeded, materialise_stages  # noqa: E402
from everstep.pipeline.frontend.split import split_model  # noqa: E402
from everstep.pipeline.frontend.trace import trace_model  # noqa: E402
from everstep.pipeline.plan import Plan  # noqa: E402
from everstep.pipeline.transport.base import TransportError  # noqa: E402
from tests.checkpoint import ranks  # noqa: E402
from tests.pipeline.architectures import Mlp  # noqa: E402
from tests.pipeline.grouping import group_options  # noqa: E402
from tests.pipeline.models import CASES, squares  # noqa: E402

pytestmark = pytest.mark.torch

STEPS, BATCH, CONTEXT = 6, 8, 12


def transformer() -> Any:
    """The model of the example, tiny, from the example itself."""
    spec = importlib.util.spec_from_file_location("char_lm", Path("examples/char-lm/model.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.manual_seed(0)
    return module.CharTransformer(CONTEXT, width=16, heads=2, depth=2)


def text(step: int) -> tuple[Any, Any]:
    """Return the batch of all replicas together in a step, out of a file that every Python has."""
    characters = torch.tensor(list(Path(os.__file__).read_bytes()[:8000])) % 128
    starts = torch.randint(len(characters) - CONTEXT, (BATCH, 1), generator=torch.Generator().manual_seed(step))
    window = characters[starts + torch.arange(CONTEXT + 1)]
    return window[:, :-1], window[:, 1:]


def mean(logits: Any, targets: Any) -> Any:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def optimizer_of(parameters: Any) -> tuple[Any, Any]:
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)


def rows(number: int, of: int) -> slice:
    return slice(number * BATCH // of, (number + 1) * BATCH // of)


def _ddp(rank: int) -> list[float]:
    model = DistributedDataParallel(transformer())
    optimizer, scheduler = optimizer_of(model.parameters())
    losses = []
    for step in range(STEPS):
        inputs, targets = (each[rows(rank, 2)] for each in text(step))
        optimizer.zero_grad()
        loss = mean(model(inputs), targets)
        loss.backward()
        optimizer.step()
        scheduler.step()
        dist.all_reduce(loss)
        losses.append(loss.item() / 2)
    return losses


def _piped(rank: int, folder: str, stages: int, dies_at: int) -> tuple[int, list[float]]:
    """From which step it trained, and the losses; one process dies."""
    start, losses = -1, list[float]()
    os.environ["EVERSTEP_PIPELINE"] = json.dumps({"stages": stages, "planFile": f"{folder}/plan.json"})
    memory, store = Path(folder, "memory"), Path(folder, "store")
    try:
        with (
            pipeline(
                transformer(),
                text(0)[0],
                mean,
                layout=LayoutOptions(global_batch=BATCH),
                engine=EngineOptions(heartbeat=20.0),
            ) as run,
            everstep.checkpointer(
                store,
                every_steps=2,
                policy="wait",
                memory=everstep.MemoryOptions(directory=memory),
                times=everstep.TimeOptions(linger=5.0),
            ) as checkpoints,
        ):
            optimizer, scheduler = optimizer_of(run.groups())
            start = checkpoints.restore(model=run, optimizer=optimizer, scheduler=scheduler).step
            for step in range(start, STEPS):
                if step == dies_at:
                    checkpoints.wait()
                    if rank == 5:
                        os.kill(os.getpid(), signal.SIGKILL)
                inputs, targets = (each[rows(run.replica, run.replicas)] for each in text(step))
                losses.append(run.step(inputs, targets).loss)
                optimizer.step()
                scheduler.step()
                checkpoints.step(step + 1)
    except (RankLost, TransportError):
        assert len(losses) == dies_at
    return start, losses


def test_a_transformer_trains_as_with_ddp_is_killed_and_goes_on_with_fewer_stages(tmp_path: Path) -> None:
    expected = ranks.run(2, _ddp)[0]
    first = ranks.run(8, _piped, str(tmp_path), 4, 5, dies=[5])
    assert first[0] == (0, pytest.approx(expected[:5], rel=1e-5))
    planned = Plan.load(tmp_path / "plan.json")
    assert sorted(planned.placement) == [0, 1, 2, 3]
    then = ranks.run(2, _piped, str(tmp_path), 2, STEPS)
    assert all(each == then[0] for each in then)
    assert then[0] == (4, pytest.approx(expected[4:], rel=1e-5))
    again = Plan.load(tmp_path / "plan.json")
    assert sorted(again.placement) == [0, 1]
    assert again.profile.spread == planned.profile.spread  # solved again, not measured again


LAYERS, WIDTH = 24, 2560  # 26 MB each
SPARE = 500 << 20  # bytes for activations, messages, what torch needs to trace, and the stacks of threads


def _train_under_a_cap(rank: int) -> tuple[list[float], str]:
    """The losses of a pipeline of two; and what becomes of the whole model under the same cap."""
    with torch.device("meta"):
        model = Mlp(LAYERS, WIDTH)
    batch = CASES["mlp"].example(4, dtype=torch.float32)
    status = Path("/proc/self/status").read_text().splitlines()
    used = next(int(line.split()[1]) << 10 for line in status if line.startswith("VmData"))
    # Half of the weights with their gradients are as much as all of the weights.
    whole = sum(parameter.numel() * 4 for parameter in model.parameters())
    resource.setrlimit(resource.RLIMIT_DATA, (used + whole + SPARE, used + whole + SPARE))
    how: dict[str, Any] = {"schedule": "1f1b", "costs": "counted", "optimizer_factor": 1.0, "heartbeat": None}
    with pipeline(model, batch.inputs, squares, **group_options(memory=int(1.15 * whole), **how)) as run:
        optimizer = torch.optim.SGD(run.groups(), lr=1e-2)
        losses = []
        for _ in range(3):
            losses.append(run.step(batch.inputs, batch.targets).loss)
            optimizer.step()
    try:
        with torch.device("meta"):
            model = Mlp(LAYERS, WIDTH)
        (everything,) = split_model(trace_model(model, batch.inputs), {})
        materialise_stages([everything], Seeded(model))
        model(**batch.inputs).sum().backward()
    except (RuntimeError, MemoryError) as error:
        return losses, str(error)
    return losses, "it fits"


def test_a_model_above_the_memory_cap_of_each_rank_is_planned_without_weights_and_trains() -> None:
    one, other = ranks.run(2, _train_under_a_cap)
    assert one[0] == other[0]
    assert one[0][0] > one[0][1] > one[0][2]
    assert "memory" in one[1]
    assert "memory" in other[1]


def _tied(rank: int) -> dict[str, Any]:
    case = CASES["gpt"]
    model, batch = case.build(), case.example(8)
    run = pipeline(
        model, batch.inputs, case.loss, schedule="zb-h1", microbatches=4, engine=EngineOptions(heartbeat=None)
    )

    def options(name: str, shape: tuple[int, ...]) -> dict[str, Any]:
        return {"weight_decay": 0.0} if len(shape) < 2 else {}

    groups = run.groups(options)
    named = {id(parameter): name for name, parameter in run.named_parameters()}
    found: dict[str, Any] = {
        "groups": [sorted(named[id(each)] for each in group["params"]) for group in groups],
        "decays": [group.get("weight_decay") for group in groups],
        "state": set(run.state_dict()),
    }
    run.eval()
    found["loss"] = run.evaluate(batch.inputs, batch.targets).loss
    with pytest.raises(PipelineError, match=r"use run\.step"):
        run(**batch.inputs)
    with pytest.raises(PipelineError, match=r"give LayoutOptions\(device="):
        run.to(torch.float32)
    return found


def test_names_groups_and_results_are_those_of_the_model() -> None:
    case = CASES["gpt"]
    model, batch = case.build(), case.example(8)
    one, other = ranks.run(2, _tied)
    assert one["state"] | other["state"] == {*model.state_dict(), "_extra_state"}
    assert one["decays"] == other["decays"] == [None, 0.0]
    every = {name for group in (*one["groups"], *other["groups"]) for name in group}
    assert every == {name for name, _ in model.named_parameters()}
    assert all(len(parameter.shape) > 1 for name, parameter in model.named_parameters() if name in one["groups"][0])
    total, count = case.loss(model.eval()(**batch.inputs), batch.targets)
    assert one["loss"] == other["loss"] == pytest.approx((total / count).item(), rel=1e-12)


class Counting(nn.Module):  # type: ignore[misc]  # torch is not where types are checked
    """Does something else each time, as no value says."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.calls = nn.Linear(4, 4), nn.Linear(4, 4), 0

    def forward(self, x: Any) -> Any:
        self.calls += 1
        return self.two(self.one(x) * self.calls)


def _refusals(rank: int) -> list[str]:
    told = []
    x = torch.ones(4, 4)
    chain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    cases: list[tuple[nn.Module, dict[str, Any]]] = [
        (Counting(), {}),  # also where measured costs would put all of it into one stage
        (chain, {"stages": 8, "schedule": "interleaved"}),
        (chain, {"memory": 50}),
        (chain, {"data_parallel": 3}),
        (chain, {"file": "/nowhere", "source": "file"}),
        (chain, {"file": f"{__file__}/plan.json"}),
    ]
    for model, how in cases:
        with pytest.raises(PipelineError) as caught:
            pipeline(model, x, squares, **group_options(heartbeat=None, **how))
        told.append(str(caught.value))
    return told


def test_what_cannot_be_right_is_refused_on_all_ranks_with_the_reason() -> None:
    one, other = ranks.run(2, _refusals)
    assert one == other
    changed, small, full, odd, absent, unkept = one
    assert changed.startswith("the model (Counting) changes its own attribute 'calls' in forward (from 0 to 1)")
    assert "parts that can be stages" in small
    assert "memory" in full
    assert odd == "data_parallel: 2 processes cannot be divided into 3 replicas"
    assert absent == "the plan file /nowhere does not exist: write it with `everstep pipeline plan`"
    assert unkept == f"the plan cannot be written to {__file__}/plan.json: File exists"


def test_without_a_process_group_it_says_what_to_call() -> None:
    with pytest.raises(PipelineError, match="init_process_group first"):
        pipeline(nn.Linear(2, 2), torch.ones(2, 2), squares)


def _chain(rank: int, folder: str) -> tuple[float, str]:
    """A model that nobody can trace, with blocks placed by a context."""
    torch.manual_seed(1)
    blocks: list[nn.Module] = [nn.Linear(4, 4), Choosing()]
    with stage(1):
        blocks += [nn.Linear(4, 4)]
    x, y = torch.randn(6, 4), torch.randn(6, 4)
    total, count = squares(nn.Sequential(*blocks)(x), y)
    how: dict[str, Any] = {"blocks": ["0", "1", "2"], "heartbeat": None, "file": Path(folder, "plan.json")}
    run = pipeline(nn.Sequential(*blocks), x, squares, **group_options(**how))
    assert run.plan.stage_of == {"0": 0, "1": 0, "2": 1}
    again = pipeline(nn.Sequential(*blocks), x, squares, **group_options(**how))
    assert again.plan == run.plan  # measured once, then kept
    loss = run.step(x, y).loss
    assert loss == pytest.approx((total / count).item(), rel=1e-5)
    return loss, ", ".join(name for name, _ in run.named_parameters())


def heavy(output: Any, targets: Any) -> Any:
    """As heavy as a head: much more than the layers before it."""
    total, count = squares(output, targets)
    return (output.repeat(1, 64) @ torch.ones(4096, 1024)).square().mean(1).sum() + total, count


def _with_and_without_targets(rank: int) -> list[int]:
    x, y = torch.randn(64, 64), torch.randn(64, 64)
    found = []
    # Counted: what a busy machine measures of such small layers may be anything.
    how: dict[str, Any] = {"stages": 2, "microbatches": 2, "schedule": "1f1b", "heartbeat": None, "costs": "counted"}
    for more in ({}, {"targets": y}):
        layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
        run = pipeline(layers, x, heavy, **group_options(**how, **more))
        found.append(sum(run.plan.stage_of[name] == 0 for name in map(str, range(6))))
    return found


def test_with_targets_the_plan_knows_what_the_loss_takes() -> None:
    (without, known), other = ranks.run(2, _with_and_without_targets)
    assert [without, known] == other
    assert known > without


class Choosing(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("sign", torch.ones(()))

    def forward(self, x: Any) -> Any:
        return x if float(self.sign) > 0 else -x


def test_a_chain_of_blocks_is_cut_where_a_context_says_and_its_plan_is_kept(tmp_path: Path) -> None:
    one, other = ranks.run(2, _chain, str(tmp_path))
    assert one[0] == other[0]
    assert (one[1], other[1]) == ("0.weight, 0.bias", "2.weight, 2.bias")


class Bare(nn.Module):  # type: ignore[misc]
    def forward(self, x: Any) -> Any:
        return torch.tanh(x)


def _averaged(rank: int, folder: str, steps: int) -> tuple[int, dict[str, Any]]:
    """Train with averages of the weights that each process keeps of its own part; the last stage has no weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), Bare())
    x, last = torch.randn(6, 4), dist.get_world_size() - 1
    stages = {str(at): min(at, last) if at < 3 else last for at in range(4)}
    how: dict[str, Any] = {"schedule": "1f1b", "microbatches": 2, "stage_of": stages, "costs": "counted"}
    memory = everstep.MemoryOptions(directory=Path(folder, f"memory-{steps}"))
    with (
        pipeline(model, x, squares, targets=x, **group_options(**how)) as run,
        everstep.checkpointer(Path(folder, "store"), every_steps=2, policy="wait", memory=memory) as checkpoints,
    ):
        optimizer = torch.optim.SGD(run.groups(), lr=0.1)
        average = {name: each.detach().clone() for name, each in run.named_parameters()}
        start = checkpoints.restore(model=run, optimizer=optimizer, average=average)
        assert set(average) == {name for name, _ in run.named_parameters()}
        for step in range(start.step, steps):
            run.step(x, x)
            optimizer.step()
            for name, each in run.named_parameters():
                average[name].lerp_(each.detach(), 0.25)
            checkpoints.step(step + 1)
    return start.step, average


def test_averages_of_the_weights_go_on_and_are_saved_again_at_another_number_of_stages(tmp_path: Path) -> None:
    (_, one), (_, other) = ranks.run(2, _averaged, str(tmp_path / "whole"), 6)
    starts = []
    for world, steps in ((4, 2), (4, 4), (2, 6)):
        starts.append([start for start, _ in ranks.run(world, _averaged, str(tmp_path / "parts"), steps)])
    assert starts == [[0] * 4, [2] * 4, [4] * 2]
    saved = everstep.load(tmp_path / "parts" / "store")["average"]
    assert saved.keys() == (one | other).keys()
    assert all(torch.allclose(saved[name], each, atol=1e-6) for name, each in (one | other).items())
