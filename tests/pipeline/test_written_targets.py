"""A loss may write the targets that it is given, as where it marks padding in place: as in one process."""

from __future__ import annotations

import copy
from typing import Any, Literal

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from everstep.pipeline import EngineOptions, PlanOptions, pipeline  # noqa: E402
from everstep.pipeline.engine.microbatch import lend_targets, split_batch  # noqa: E402
from tests.checkpoint import ranks  # noqa: E402

pytestmark = pytest.mark.torch

WORDS = torch.arange(48).view(8, 6) % 7


class Tagger(nn.Module):  # type: ignore[misc]  # torch is not where types are checked
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.three = nn.Embedding(7, 8), nn.Linear(8, 8), nn.Linear(8, 7)
        self.double()

    def forward(self, words: Any) -> Any:
        return self.three(self.two(self.one(words)).tanh())


def _masked(output: Any, targets: Any) -> Any:
    """Marks padding in place; autograd keeps these targets for the backward."""
    targets[targets == 0] = -100
    total = functional.cross_entropy(output.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
    return total, (targets != -100).sum()


def _shifted(output: Any, targets: Any) -> Any:
    """Counts its classes from 1, which shows if it gets the same targets twice."""
    targets.add_(1).remainder_(7)
    total = functional.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="sum")
    return total, targets.numel()


def _scaled(output: Any, targets: Any) -> Any:
    """Writes a number that is that of the whole batch."""
    targets["scale"].mul_(2.0)
    total = functional.cross_entropy(output.flatten(0, 1), targets["words"].flatten(), reduction="sum")
    return total * targets["scale"].clone(), targets["words"].numel()


def _targets_of(loss: Any) -> Any:
    return {"words": WORDS.clone(), "scale": torch.tensor(1.0)} if loss is _scaled else WORDS.clone()


def _train(rank: int) -> list[tuple[Any, ...]]:
    wrong: list[tuple[Any, ...]] = []
    costs: Literal["counted", "measured"]
    for loss in (_masked, _shifted, _scaled):
        alone = Tagger()
        total, count = loss(alone(WORDS), _targets_of(loss))
        (total / count).backward()
        expected = {name: each.grad for name, each in alone.named_parameters()}
        for schedule, recompute, costs, known in (
            ("1f1b", False, "counted", True),
            ("simple", False, "measured", True),
            ("simple", False, "counted", False),
            ("zb-h1", True, "counted", True),
        ):
            targets = _targets_of(loss)
            before = copy.deepcopy(targets)
            with pipeline(
                Tagger(),
                WORDS,
                loss,
                targets=targets if known else None,
                microbatches=3,
                schedule=schedule,
                plan=PlanOptions(costs=costs),
                engine=EngineOptions(heartbeat=None, recompute=recompute),
            ) as run:
                is_kept = all(map(torch.equal, _tensors(before), _tensors(targets)))
                done = run.step(WORDS, targets)
                close = [torch.allclose(each.grad, expected[name]) for name, each in run.named_parameters()]
            if not (is_kept and all(close) and done.loss == pytest.approx(float(total / count))):
                wrong.append((loss.__name__, schedule, recompute, costs, known, is_kept, close, done.loss))
    return wrong


def _tensors(targets: Any) -> list[Any]:
    return list(targets.values()) if isinstance(targets, dict) else [targets]


def test_a_loss_that_writes_its_targets_trains_as_in_one_process_and_pipeline_leaves_them_alone() -> None:
    assert ranks.run(2, _train) == [[], []]


def test_what_is_written_into_the_targets_of_a_micro_batch_is_written_into_those_of_the_batch() -> None:
    batch = WORDS.clone()
    parts = [lend_targets(part, copied=False) for part in split_batch(batch, len(batch), 2)]
    version = parts[1]._version
    parts[0].fill_(-100)
    assert bool((batch[:4] == -100).all())
    assert torch.equal(batch[4:], WORDS[4:])
    assert parts[1]._version == version
