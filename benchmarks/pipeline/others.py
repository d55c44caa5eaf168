"""Compares torch.distributed.pipelining and everstep.pipeline on what models have.

`python -m benchmarks.pipeline.others [QUESTION ...]` prints a table, and the reasons for each cell.

Each cell is one step in float64 on gloo, in processes of its own with a time limit, against one process: gradients of
all ranks, and running statistics. Four stages; on four ranks where a schedule has one on each, else on two.
"""

from __future__ import annotations

import re
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from multiprocessing import forkserver
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.nn.parallel import DistributedDataParallel

from everstep.pipeline.engine.engine import Engine
from everstep.pipeline.engine.microbatch import compute_bounds
from everstep.pipeline.schedules import lower_schedule, make_schedule
from everstep.pipeline.transport.gloo import ProcessGroups
from everstep.pipeline.transport.grid import make_grid
from tests.checkpoint.ranks import RankFailed, run
from tests.pipeline import front
from tests.pipeline.architectures import WORDS, Mlp
from tests.pipeline.models import CASES, IGNORED, Batch, Case, slice_batch, squares, words

STAGES = 4
MICROBATCHES = 4
LIMIT = 40.0  # seconds
CLOSE = 1e-10
SCHEDULES = {  # ours: theirs
    "simple": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "zb-interleaved": "InterleavedZeroBubble",
    "zb-v": "ZBVZeroBubble",
}
FLAT = ("simple", "1f1b")

Numbers = dict[str, Any]  # by the names of the model


@dataclass(frozen=True)
class Question:
    """`cuts`: the modules that begin a stage; a chain is cut by hand for torch, where `cuts` are places in it."""

    name: str
    case: Case
    cuts: tuple[str, ...]
    samples: int = 8
    replicas: int = 1

    @property
    def chain(self) -> bool:
        return all(cut.isdigit() for cut in self.cuts)


class Several(nn.Module):  # type: ignore[misc]
    def forward(self, x: Any) -> dict[str, Any]:
        return {"out": x, "more": (x.sum(1), [x.exp()])}


class Nested(nn.Sequential):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__(*Mlp().children(), Several())

    def forward(self, x: Any) -> Any:
        return super().forward(x)


class Tokens(nn.Sequential):  # type: ignore[misc]
    def __init__(self, width: int = 16, *, tied: bool = False) -> None:
        layers = [layer for _ in range(3) for layer in (nn.Linear(width, width), nn.Tanh())]
        super().__init__(nn.Embedding(WORDS, width), *layers, nn.Linear(width, WORDS))
        if tied:
            self[-1].weight = self[0].weight


def _nested_loss(outputs: Any, targets: Any) -> tuple[Any, Any]:
    total, count = squares(outputs["out"], targets)
    first, (second,) = outputs["more"]
    return total + first.square().sum() + second.sum(), count


def _padded(samples: int, seed: int) -> Batch:
    random = torch.Generator().manual_seed(seed)
    tokens = torch.randint(WORDS, (samples, 8), generator=random)
    lengths = torch.randint(1, 9, (samples, 1), generator=random)
    return Batch({"input": tokens}, tokens.roll(-1, 1).where(torch.arange(8) < lengths, IGNORED))


def _sentences(samples: int, seed: int) -> Batch:
    tokens = torch.randint(WORDS, (samples, 8), generator=torch.Generator().manual_seed(seed))
    return Batch({"input": tokens}, tokens.roll(-1, 1))


_MLP = CASES["mlp"]
QUESTIONS = (
    Question("a chain", _MLP, ("3", "6", "9")),
    Question("replicas", _MLP, ("3", "6", "9"), samples=16, replicas=2),
    Question("uneven batch", _MLP, ("3", "6", "9"), samples=10),
    Question("mean over words that count", Case("padded", Tokens, _padded, words), ("2", "4", "6")),
    Question("nested outputs", Case("nested", Nested, _MLP.batch, _nested_loss), ("3", "6", "9")),
    Question("skip connections", CASES["unet"], ("down.1", "up.0", "up.2")),
    Question("a mask for all layers", CASES["bert"], ("layers.1", "layers.2", "layers.3")),
    Question("tied weights", Case("tied", partial(Tokens, tied=True), _sentences, words), ("2", "4", "6")),
    Question("GPT-2, tied, one mask", CASES["gpt"], ("h.1", "h.2", "h.3")),
    Question("BatchNorm statistics", CASES["resnet"], ("layer2", "layer3", "layer4")),
    Question("experts chosen by the data", CASES["experts"], ("attention.1", "attention.2", "head")),
)


def ranks_of(schedule: str) -> int:
    return STAGES if schedule in FLAT else STAGES // 2


def part(question: Question, replica: int) -> Batch:
    start, stop = compute_bounds(question.samples, question.replicas)[replica]
    return slice_batch(question.case.example(question.samples), start, stop)


def theirs(rank: int, question: Question, schedule: str) -> tuple[Numbers, Numbers]:
    """One rank of torch.distributed.pipelining, used as its documentation says."""
    ranks = ranks_of(schedule)
    replica, place = divmod(rank, ranks)
    pipelines = [dist.new_group([r * ranks + p for p in range(ranks)]) for r in range(question.replicas)]
    columns = [dist.new_group([r * ranks + p for r in range(question.replicas)]) for p in range(ranks)]
    model, batch, device = question.case.build(), part(question, replica), torch.device("cpu")
    second = 2 * ranks - 1 - place if schedule == "zb-v" else place + ranks
    own = [place] if schedule in FLAT else [place, second]
    if question.chain:
        layers = list(model.named_children())
        places = [0, *map(int, question.cuts), len(layers)]
        parts: list[Any] = [nn.Sequential(OrderedDict(layers[a:b])) for a, b in pairwise(places)]
        if question.replicas > 1:
            parts = [
                DistributedDataParallel(each, process_group=columns[place]) if index in own else each
                for index, each in enumerate(parts)
            ]
        stages = [pipelining.PipelineStage(parts[i], i, STAGES, device, group=pipelines[replica]) for i in own]
    else:
        example = slice_batch(batch, 0, len(batch.targets) // MICROBATCHES)
        cuts = dict.fromkeys(question.cuts, pipelining.SplitPoint.BEGINNING)
        pipe = pipelining.pipeline(model, tuple(example.inputs.values()), split_spec=cuts)
        stages = [pipe.build_stage(i, device, pipelines[replica]) for i in own]

    def loss(outputs: Any, targets: Any) -> Any:
        total, count = question.case.loss(outputs, targets)
        return total / count

    make_schedule: Any = pipelining.schedules.get_schedule_class(SCHEDULES[schedule])
    run_: Any = make_schedule(stages[0] if schedule in FLAT else stages, MICROBATCHES, loss)
    inputs = tuple(batch.inputs.values()) if 0 in own else ()
    run_.step(*inputs, **({"target": batch.targets} if STAGES - 1 in own else {}))
    modules = [stage.submod for stage in stages]
    gradients = {_plain(name): p.grad for module in modules for name, p in module.named_parameters()}
    return gradients, {_plain(name): b for module in modules for name, b in module.named_buffers()}


def ours(rank: int, question: Question, schedule: str) -> tuple[Numbers, Numbers]:
    """One rank of everstep.pipeline."""
    ranks = ranks_of(schedule)
    transport = ProcessGroups(make_grid(ranks * question.replicas, ranks))
    parts, graph = front.cut(question.case, STAGES, torch.float64, 0)
    actions = lower_schedule(make_schedule(schedule, STAGES, ranks, MICROBATCHES), graph)
    stages = {index: parts[index] for index in actions.stages_of(transport.rank)}
    engine = Engine(stages, actions, graph, transport, question.case.loss)
    batch = part(question, transport.replica)
    engine.step(batch.inputs, batch.targets)
    return {name: p.grad for name, p in engine.parameters.named.items()}, engine.parameters.buffers


def alone(question: Question) -> tuple[Numbers, Numbers]:
    """One process; the statistics of a BatchNorm are those of the whole batch, its values those of micro-batches."""
    model, total = question.case.build(), 0.0
    seen: dict[str, list[Any]] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.register_forward_hook(lambda m, i, o, name=name: seen.setdefault(name, []).append(i[0].detach()))
    for each in _microbatches(question) if question.case.per_microbatch else [question.case.example(question.samples)]:
        loss, count = question.case.loss(model(**each.inputs), each.targets)
        loss.backward()
        total += float(count)
    gradients = {name: p.grad / total for name, p in model.named_parameters(remove_duplicate=False)}
    buffers: Numbers = {}
    for name, inputs in seen.items():
        values = torch.cat(inputs).transpose(0, 1).flatten(1)
        buffers[f"{name}.running_mean"] = 0.1 * values.mean(1)
        buffers[f"{name}.running_var"] = 0.9 + 0.1 * values.var(1)
    return gradients, buffers


def verdict(question: Question, schedule: str, work: Callable[..., tuple[Numbers, Numbers]]) -> tuple[str, str]:
    """Return a word, and the reason."""
    world = ranks_of(schedule) * question.replicas
    for patience in (1, 2):  # a machine that stood still is no library that hangs
        try:
            found = run(world, work, question, schedule, timeout=patience * LIMIT)
            break
        except RankFailed as error:
            if "have not ended" not in str(error):
                return "refuses", _reason(str(error))
    else:
        return "hangs", f"no end within {LIMIT:.0f} s"
    return _compared(found, alone(question))


def _compared(found: list[tuple[Numbers, Numbers]], expected: tuple[Numbers, Numbers]) -> tuple[str, str]:
    worst = {"gradients": 0.0, "running statistics": 0.0}
    for kind, index in (("gradients", 0), ("running statistics", 1)):
        for name, wanted in expected[index].items():
            copies = [rank[index][name] for rank in found if name in rank[index]]
            if not copies:
                if kind == "gradients" and not any(torch.equal(wanted, o) for n, o in expected[0].items() if n != name):
                    return "wrong", f"no rank has {name}"
                continue  # another name of a shared parameter
            for each in copies:
                error = 1.0 if each is None else float((each - wanted).abs().max() / wanted.abs().max().clamp(min=1e-3))
                worst[kind] = max(worst[kind], error)
    bad = [f"{kind} {error:.0e} off" for kind, error in worst.items() if error > CLOSE]
    return ("wrong", ", ".join(bad)) if bad else ("right", f"{max(worst.values()):.0e}")


def _microbatches(question: Question) -> Iterator[Batch]:
    for replica in range(question.replicas):
        batch = part(question, replica)
        for start, stop in compute_bounds(len(batch.targets), MICROBATCHES):
            yield slice_batch(batch, start, stop)


def _plain(name: str) -> str:
    return name.removeprefix("module.")


def _reason(trace: str) -> str:
    lines = [line for line in trace.splitlines() if re.match(r"[\w.]*(Error|Exception|died)\b", line.strip())]
    return (lines[-1] if lines else trace.splitlines()[-1]).strip()[:160]


def main() -> None:
    # What takes seconds to import, once.
    forkserver.set_forkserver_preload(
        ["torch.distributed.pipelining", "tests.checkpoint.ranks", "tests.pipeline.front"]
    )
    forkserver.ensure_running()
    asked = [question for question in QUESTIONS if not sys.argv[1:] or question.name in sys.argv[1:]]
    reasons: list[str] = []
    print(f"torch {torch.__version__}; each cell: torch.distributed.pipelining / everstep.pipeline\n")
    print("| | " + " | ".join(f"{their} / {our}" for our, their in SCHEDULES.items()) + " |")
    print("|---" * (len(SCHEDULES) + 1) + "|")
    for question in asked:
        cells = []
        for schedule in SCHEDULES:
            both = {work.__name__: verdict(question, schedule, work) for work in (theirs, ours)}
            cells.append(" / ".join(word for word, _ in both.values()))
            reasons += [
                f"- {question.name}, {schedule}, {who}: {word}, {reason}" for who, (word, reason) in both.items()
            ]
        print(f"| {question.name} | " + " | ".join(cells) + " |", flush=True)
    print("\n" + "\n".join(reasons))


if __name__ == "__main__":
    main()
