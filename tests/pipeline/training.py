"""A few steps of training by a pipeline, and by one process; and how far apart they end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from everstep.pipeline.engine.engine import Engine
from everstep.pipeline.engine.microbatch import compute_bounds
from everstep.pipeline.engine.options import EngineOptions
from everstep.pipeline.engine.rng import Random
from everstep.pipeline.engine.step_result import StepResult
from everstep.pipeline.engine.zero import ShardedOptimizer
from everstep.pipeline.graph import StageGraph
from everstep.pipeline.schedules import Schedule, lower_schedule, make_schedule
from everstep.pipeline.transport.base import Transport
from tests.pipeline.by_hand import cut, recipe
from tests.pipeline.compiled import COMPILED
from tests.pipeline.inprocess import Fabric
from tests.pipeline.library_models import LIBRARY
from tests.pipeline.models import CASES, Batch, Case, slice_batch


@dataclass(frozen=True)
class Setting:
    """One cell of the matrix: which model, cut and run how, on which batches."""

    case: str
    schedule: str = "1f1b"
    stages: int = 2
    ranks: int = 2
    microbatches: int = 4
    replicas: int = 1
    samples: int = 8  # of all replicas together, in each step
    steps: int = 2
    dtype: torch.dtype = torch.float64
    options: EngineOptions = field(default_factory=EngineOptions)
    sharded: bool = False  # the optimizer's state, over the replicas
    by_hand: bool = True  # else the front end cuts

    def __str__(self) -> str:
        shape = f"{self.stages}s{self.ranks}r{self.replicas}d{self.microbatches}m{self.samples}n"
        return f"{self.case}-{self.schedule}-{shape}"


@dataclass
class Trained:
    """`gradients` of the first step, `weights` and `buffers` at the end, by original names; `losses` of the steps."""

    losses: list[float]
    gradients: dict[str, Any]
    weights: dict[str, Any]
    buffers: dict[str, Any]
    outputs: list[StepResult] = field(default_factory=list)


def setting_of(row: Mapping[str, Any], **more: Any) -> Setting:
    """Return the setting for the choices in `row`: case, schedule, ranks, replicas, batch, and others."""
    ranks, replicas, microbatches = row["ranks"], row["replicas"], row.get("microbatches", 4)
    stages = ranks if row["schedule"] in ("simple", "1f1b", "zb-h1") else 2 * ranks
    samples = {
        "divisible": 2 * replicas * microbatches,
        "uneven": 2 * replicas * microbatches + 1,
        "small": replicas * (microbatches - 1),  # one each, and the last micro-batch has none
    }
    recompute = frozenset(range(stages)) if row.get("recompute") else frozenset[int]()
    return Setting(
        row["case"],
        row["schedule"],
        stages,
        ranks,
        microbatches,
        replicas,
        samples[row["batch"]],
        steps=5,
        options=EngineOptions(
            recompute=recompute, clip=row.get("clip"), bucket=row.get("bucket", EngineOptions.bucket)
        ),
        sharded=row.get("sharded", False),
        **more,
    )


def case_of(setting: Setting) -> Case:
    return CASES.get(setting.case) or COMPILED.get(setting.case) or LIBRARY[setting.case]


def batch_of(setting: Setting, step: int) -> Batch:
    return case_of(setting).example(setting.samples, seed=10 + step, dtype=setting.dtype)


def optimizer_of(parameters: Sequence[Any], dtype: torch.dtype) -> torch.optim.Optimizer:
    # A gradient that is zero but for rounding, as that of a key's bias under softmax, moves its weight by what is
    # rounded over eps.
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-6 if dtype == torch.float64 else 1e-3)


def schedule_of(setting: Setting, graph: StageGraph) -> Schedule:
    split = frozenset(range(setting.stages))
    return lower_schedule(
        make_schedule(setting.schedule, setting.stages, setting.ranks, setting.microbatches, split), graph
    )


def alone(setting: Setting, *, rounded: bool = False) -> Trained:
    """One process: the whole batch at once, or where that makes a difference in the same micro-batches. `rounded`: from
    weights of which the last bit is another one."""
    case = case_of(setting)
    model = case.build(dtype=setting.dtype)
    if rounded:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + torch.finfo(setting.dtype).eps)
    optimizer = optimizer_of(list(model.parameters()), setting.dtype)
    losses, first = [], {}
    random = Random(dict(model.named_modules()), torch.device("cpu"), setting.options.seed)
    for step in range(setting.steps):
        batch = batch_of(setting, step)
        optimizer.zero_grad()
        total, count = 0.0, 0.0
        for number, part in _parts(setting, batch) if case.per_microbatch else [(0, batch)]:
            with random.kept(), random.of(number):
                outputs = model(**part.inputs)
            part_sum, part_count = case.loss(outputs, part.targets)
            part_sum.backward()
            total, count = total + part_sum.item(), count + float(part_count)
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= count
        if setting.options.clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), setting.options.clip)
        if not step:
            first = {name: _copy(parameter.grad) for name, parameter in model.named_parameters()}
        optimizer.step()
        random.next_step()
        losses.append(total / count)
    return Trained(losses, first, _state(model.named_parameters()), _state(model.named_buffers()))


def piped(setting: Setting, *, blocking: bool = False, seed: int | None = None) -> Trained:
    """Threads of this process."""
    fabric = Fabric(setting.ranks, setting.replicas, blocking=blocking, seed=seed)
    return merged(fabric.run(lambda transport: train(setting, transport)))


def engine_of(
    setting: Setting,
    transport: Transport,
    loss: Any = None,
    options: EngineOptions | None = None,
    change: Callable[[Schedule], Schedule] = lambda schedule: schedule,
) -> Engine:
    """One rank of the setting, with its own copy of the model."""
    case = case_of(setting)
    parts: Sequence[Any]
    if setting.by_hand:
        model = case.build(dtype=setting.dtype)
        parts, graph = cut(model, recipe(setting.case, model), setting.stages)
    else:
        from tests.pipeline import front  # takes seconds to import; ranks by the dozen do without

        process = transport.replica * transport.size + transport.rank
        parts, graph = front.cut(case, setting.stages, setting.dtype, process)
    schedule = change(schedule_of(setting, graph))
    stages = {index: parts[index] for index in schedule.stages_of(transport.rank)}
    return Engine(stages, schedule, graph, transport, loss or case.loss, options or setting.options)


def train(
    setting: Setting, transport: Transport, change: Callable[[Schedule], Schedule] = lambda schedule: schedule
) -> Trained:
    """The part of one rank."""
    engine = engine_of(setting, transport, change=change)
    optimizer: Any = None
    if setting.sharded:
        optimizer = ShardedOptimizer(engine, lambda named: optimizer_of(list(named.values()), setting.dtype))
    elif engine.parameters.own:  # a stage may have none
        optimizer = optimizer_of(engine.parameters.own, setting.dtype)
    outputs, first = [], {}
    for step in range(setting.steps):
        mine = share(setting, transport.replica, batch_of(setting, step))
        outputs.append(engine.step(mine.inputs if engine.reads.inputs else None, mine.targets))
        if not step:
            first = {name: _copy(each.grad) for name, each in engine.parameters.named.items() if _is_here(engine, each)}
        if optimizer is not None:
            optimizer.step()
    weights = _state(engine.parameters.named.items())
    buffers = _state(engine.parameters.buffers.items())
    engine.close()
    return Trained([output.loss for output in outputs], first, weights, buffers, outputs)


def _is_here(engine: Engine, parameter: Any) -> bool:
    """Tell whether this replica has the sum of the parameter's gradients; one that has not must have nothing."""
    here = engine.transport.replica
    is_here = engine.parameters.reduction.keepers.get(parameter, here) == here
    assert is_here or parameter.grad is None
    return is_here


def share(setting: Setting, replica: int, batch: Batch) -> Batch:
    start, stop = _shares(setting)[replica]
    return slice_batch(batch, start, stop)


def merged(ranks: Sequence[Trained]) -> Trained:
    """Merge the results of the ranks; those that several ranks have must be equal bit for bit."""
    whole = Trained(ranks[0].losses, {}, {}, {}, ranks[-1].outputs)
    for rank in ranks:
        assert rank.losses == whole.losses, "ranks tell different losses"
        for mine, all_ in (
            (rank.gradients, whole.gradients),
            (rank.weights, whole.weights),
            (rank.buffers, whole.buffers),
        ):
            for name, tensor in mine.items():
                known = all_.setdefault(name, tensor)
                assert (known is tensor) or torch.equal(known, tensor), f"copies of {name} differ"
    return whole


def apart(one: Trained, other: Trained) -> float:
    """The largest difference of losses, gradients and weights, relative to the largest number of each tensor."""
    assert one.weights.keys() == other.weights.keys()
    found = [abs(a - b) / max(1.0, abs(b)) for a, b in zip(one.losses, other.losses, strict=True)]
    for mine, theirs in ((one.gradients, other.gradients), (one.weights, other.weights)):
        for name, tensor in theirs.items():
            assert (mine[name] is None) == (tensor is None), f"only one has a gradient of {name}"
            if tensor is not None:
                found.append(float((mine[name] - tensor).abs().max() / tensor.abs().max().clamp(min=1e-3)))
    return max(found)


def _shares(setting: Setting) -> list[tuple[int, int]]:
    return compute_bounds(setting.samples, setting.replicas)


def _parts(setting: Setting, batch: Batch) -> list[tuple[int, Batch]]:
    """The micro-batches of all replicas, and the number that each has among all."""
    found = []
    for replica, (start, stop) in enumerate(_shares(setting)):
        for number, (low, high) in enumerate(compute_bounds(stop - start, setting.microbatches)):
            part = slice_batch(batch, start + low, start + high)
            found.append((replica * setting.microbatches + number, part))
    return found


def _state(named: Any) -> dict[str, Any]:
    return {name: _copy(tensor) for name, tensor in named}


def _copy(tensor: Any) -> Any:
    return None if tensor is None else tensor.detach().clone()
