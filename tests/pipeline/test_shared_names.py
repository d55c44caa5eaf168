"""A weight with several names in a model has the same first name on every process, whatever stages these have."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from everstep.pipeline import pipeline  # noqa: E402
from everstep.pipeline.frontend.skeleton import join_skeletons  # noqa: E402
from everstep.pipeline.frontend.split import split_model  # noqa: E402
from everstep.pipeline.frontend.trace import trace_model  # noqa: E402
from tests.checkpoint import ranks  # noqa: E402
from tests.pipeline.grouping import group_options  # noqa: E402

pytestmark = pytest.mark.torch

WHERE = {"encoder.a": 0, "encoder.b": 1, "encoder.c": 2, "shared": 3}


class Encoder(nn.Module):  # type: ignore[misc]  # torch is not where types are checked
    def __init__(self, table: Any) -> None:
        super().__init__()
        self.table, self.a, self.b, self.c = table, nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        return self.c(self.b(self.a(x).tanh()).tanh()).tanh()


class Shared(nn.Module):  # type: ignore[misc]
    """As T5 has its embedding: first on its own, then once more in a module of which other stages have parts too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shared = nn.Linear(4, 4)
        self.encoder = Encoder(self.shared)
        self.double()

    def forward(self, x: Any) -> Any:
        return self.shared(self.encoder(x))


class Noisy(nn.Module):  # type: ignore[misc]
    """It draws, so that it is never cut."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Any) -> Any:
        return self.inner(x + 0.0 * torch.rand_like(x))


class SharedInWhole(nn.Module):  # type: ignore[misc]
    """Its weight is used under its second name only, in a module that is not cut."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shared, self.first = nn.Linear(4, 4), nn.Linear(4, 4)
        self.noisy = Noisy(self.shared)
        self.double()

    def forward(self, x: Any) -> Any:
        return self.noisy(self.first(x).tanh())


def batch(step: int) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(2, 8, 4, generator=generator, dtype=torch.float64)
    return x, y


def squares(output: Any, target: Any) -> Any:
    return (output - target).square().mean()


def _train(rank: int, kind: Any, how: dict[str, Any]) -> tuple[list[float], list[str], int]:
    model, losses = kind(), list[float]()
    options = group_options(heartbeat=None, microbatches=4, costs="counted", **how)
    with pipeline(model, batch(0)[0], squares, **options) as run:
        groups = run.groups()
        optimizer = torch.optim.SGD(groups, lr=0.5)
        for step in range(4):
            losses.append(run.step(*batch(step)).loss)
            optimizer.step()
        names = [name for name, _ in run.named_parameters()]
    return losses, names, len(groups[0]["params"])


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        (Shared, {"stage_of": WHERE, "schedule": "interleaved"}),
        (SharedInWhole, {"stage_of": {"first": 0, "noisy": 1}}),
    ],
)
def test_a_weight_with_several_names_is_trained_and_has_the_name_of_the_model(kind: Any, how: Any) -> None:
    model = kind()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    expected = []
    for step in range(4):
        optimizer.zero_grad()
        loss = squares(model(batch(step)[0]), batch(step)[1])
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    for losses, names, count in ranks.run(2, _train, kind, how):
        assert losses == pytest.approx(expected, rel=1e-12)
        assert names == [name for name, _ in model.named_parameters() if name in names]
        assert count == len(names)


def test_stages_of_a_process_are_joined_in_the_order_of_the_model() -> None:
    model = Shared()
    stages = split_model(trace_model(model, {"x": batch(0)[0]}), WHERE)
    for one, other in ((1, 3), (3, 1)):
        joined = join_skeletons([stages[one].module, stages[other].module])
        every = [name for name, _ in joined.named_parameters(remove_duplicate=False)]
        assert every == [name for name, _ in model.named_parameters(remove_duplicate=False) if name in every]


class Block(nn.Module):  # type: ignore[misc]
    """Has a layer of its own, and the dropout of the model."""

    def __init__(self, dropout: Any) -> None:
        super().__init__()
        self.layer, self.dropout = nn.Linear(4, 4), dropout

    def forward(self, x: Any) -> Any:
        return self.dropout(self.layer(x).tanh())


class OneDropout(nn.Module):  # type: ignore[misc]
    """The model has the dropout of its blocks too, and never calls it by that name."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dropout = nn.Dropout(0.5)
        self.blocks = nn.ModuleList(Block(self.dropout) for _ in range(4))
        self.double()

    def forward(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        return x


def test_a_module_with_several_names_draws_the_same_wherever_the_model_is_cut() -> None:
    cuts = [{f"blocks.{block}": int(block >= first) for block in range(4)} for first in (1, 3)]
    early, late = (ranks.run(2, _train, OneDropout, {"stage_of": cut})[0][0] for cut in cuts)
    assert early == pytest.approx(late, rel=1e-12)


class NoisyTable(nn.Module):  # type: ignore[misc]
    """Draws beside the module in it, whose weight is used elsewhere too, as an encoder with a tied embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        return nn.functional.dropout(self.table(x).tanh(), 0.5, self.training)


class TiedToNoisy(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.noisy, self.middle, self.tied, self.head = NoisyTable(), *(nn.Linear(4, 4) for _ in range(3))
        self.tied.weight = self.noisy.table.weight
        self.double()

    def forward(self, x: Any) -> Any:
        return self.head(self.tied(self.middle(self.noisy(x)).tanh()).tanh())


def test_a_module_that_draws_and_one_of_whose_weights_another_stage_of_its_process_has_draws_the_same() -> None:
    cuts = ({"noisy": 0, "middle": 1, "tied": 1, "head": 1}, {"noisy": 0, "middle": 1, "tied": 2, "head": 3})
    apart, together = (ranks.run(2, _train, TiedToNoisy, {"stage_of": cut, "schedule": "simple"})[0][0] for cut in cuts)
    assert together == pytest.approx(apart, rel=1e-12)
