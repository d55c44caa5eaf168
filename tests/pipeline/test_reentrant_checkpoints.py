"""A reentrant activation checkpoint gives its parameters no gradient where nothing that it is given has one."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from everstep.pipeline import pipeline  # noqa: E402
from tests.checkpoint import ranks  # noqa: E402
from tests.long_sweeps import only_in_long_sweeps  # noqa: E402
from tests.pipeline.grouping import group_options  # noqa: E402

pytestmark = pytest.mark.torch


class Recomputed(nn.Module):  # type: ignore[misc]  # torch is not where types are checked
    """A block that recomputes its two layers, one inside the other's checkpoint where it is `nested`."""

    def __init__(self, nested: bool) -> None:
        super().__init__()
        self.nested, self.one, self.two = nested, nn.Linear(4, 4), nn.Linear(4, 4)

    def inner(self, x: Any) -> Any:
        x = checkpoint(self.one, x, use_reentrant=True) if self.nested else self.one(x)
        return self.two(x.tanh())

    def forward(self, x: Any) -> Any:
        return checkpoint(self.inner, x, use_reentrant=not self.nested)


class Blocks(nn.Module):  # type: ignore[misc]
    """The first block has no gradient by what it is given, the second by an embedding that is frozen, or has one."""

    def __init__(self, nested: bool, frozen: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.ones(4), requires_grad=not frozen)
        self.first, self.second, self.last = Recomputed(nested), Recomputed(nested), nn.Linear(4, 4)
        self.double()

    def forward(self, x: Any) -> Any:
        return self.last(self.second(self.first(x).tanh() * self.scale).tanh())


def square(output: Any, targets: Any) -> Any:
    return (output - targets).square().sum(), len(targets)


CASES = [(nested, frozen) for nested in (False, True) for frozen in (False, True)]
CUTS = [{"first": 0, "second": 1}, {"first.one": 0, "first.two": 1}]


def _make_batch() -> Any:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def _train(rank: int, schedule: str, cut: dict[str, int]) -> list[tuple[dict[str, Any], float]]:
    x, found = _make_batch(), []
    how: dict[str, Any] = {"stage_of": cut, "heartbeat": None, "microbatches": 4}
    for nested, frozen in CASES:
        with pipeline(Blocks(nested, frozen), x, square, schedule=schedule, **group_options(**how)) as run:
            loss = run.step(x, x).loss
            found.append(({name: each.grad for name, each in run.named_parameters()}, loss))
    return found


@pytest.mark.parametrize(
    ("cut", "schedule"),
    [(CUTS[0], "zb-h1"), (CUTS[1], "1f1b"), *only_in_long_sweeps((CUTS[0], "1f1b"), (CUTS[1], "zb-h1"))],
)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning")
def test_parameters_in_a_reentrant_checkpoint_learn_where_they_do_in_one_process(
    schedule: str, cut: dict[str, int]
) -> None:
    x = _make_batch()
    by_rank = ranks.run(2, _train, schedule, cut)
    for (nested, frozen), *found in zip(CASES, *by_rank, strict=True):
        model = Blocks(nested, frozen)
        total, count = square(model(x), x)
        (total / count).backward()
        for gradients, loss in found:
            assert loss == pytest.approx(float(total) / count, rel=1e-10)
            for name, own in gradients.items():
                wanted = model.get_parameter(name).grad
                assert (own is None) == (wanted is None), (name, nested, frozen)
                assert own is None or torch.allclose(own, wanted, rtol=1e-10, atol=1e-12), (name, nested, frozen)
