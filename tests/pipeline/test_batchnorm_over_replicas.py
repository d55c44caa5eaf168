"""Statistics of batch normalisation are put together whatever each replica has of a batch."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from everstep.pipeline import LayoutOptions, PlanOptions, pipeline  # noqa: E402
from tests.checkpoint import ranks  # noqa: E402

pytestmark = pytest.mark.torch


class Recurrent(nn.Module):  # type: ignore[misc]  # torch is not where types are checked
    """Normalises once for each word of the longest text."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.BatchNorm1d(4), nn.Linear(4, 4)

    def forward(self, x: Any, lengths: Any) -> Any:
        state = x[:, 0]
        for word in range(int(lengths.max())):
            state = self.norm(self.layer(state)).tanh() + x[:, word]
        return state


class Reading(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.first, self.recurrent, self.last = nn.Linear(4, 4), Recurrent(), nn.Linear(4, 3)

    def forward(self, x: Any, lengths: Any) -> Any:
        return self.last(self.recurrent(self.first(x), lengths))


def _build() -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    return Reading().double(), torch.randn(6, 5, 4).double(), torch.randint(3, (6,))


def _train(rank: int, how: str) -> dict[str, Any]:
    model, x, targets = _build()
    lengths = torch.full((6,), 3)
    with pipeline(
        model,
        {"x": x, "lengths": lengths},
        nn.CrossEntropyLoss(),
        targets=targets,
        microbatches=1,
        layout=LayoutOptions(data_parallel=2),
        plan=PlanOptions(costs="counted"),
    ) as run:
        if run.replica == 1 and how == "empty":
            x, targets, lengths = x[:0], targets[:0], lengths[:0]
        if run.replica == 1 and how == "longer":
            lengths = lengths + 2
        if run.replica == 1 and how == "modes":
            run.recurrent.norm.eval()
        run.step({"x": x, "lengths": lengths}, targets)
        return {name: each.tolist() for name, each in run.named_buffers()}


def test_a_replica_without_samples_in_the_first_step_takes_part_in_each_call_of_a_layer() -> None:
    one, other = ranks.run(2, _train, "empty")
    model, x, _ = _build()
    model(x, torch.full((6,), 3))
    assert one == other
    for name, buffer in model.named_buffers():
        assert one[name] == pytest.approx(buffer.tolist(), rel=1e-10), name


def test_replicas_may_call_a_layer_as_often_as_their_texts_have_words() -> None:
    one, other = ranks.run(2, _train, "longer")
    assert one == other
    assert one["recurrent.norm.num_batches_tracked"] == 5


def test_a_layer_that_is_in_training_on_some_replicas_only_is_refused() -> None:
    with pytest.raises(ranks.RankFailed, match=r"BatchNorm1d.* is in training on some replicas and not on others"):
        ranks.run(2, _train, "modes")
