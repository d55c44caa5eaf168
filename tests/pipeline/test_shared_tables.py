"""Blocks that share a table, which the first of them makes in its call, are cut from each other, also if they draw."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from everstep.pipeline import pipeline  # noqa: E402
from everstep.pipeline.errors import PipelineError  # noqa: E402
from everstep.pipeline.frontend import split_model, trace_model  # noqa: E402
from everstep.pipeline.frontend.skeleton import Drawing  # noqa: E402
from tests.checkpoint import ranks  # noqa: E402
from tests.pipeline.grouping import group_options  # noqa: E402

pytestmark = pytest.mark.torch

FEATURES = 4
BLOCKS = 3


class Rotary(nn.Module):  # type: ignore[misc]  # torch is not where types are checked
    """Keeps the angles of as many positions as it has seen, as usual rotary embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.cosine: Any = None

    def forward(self, x: Any) -> Any:
        if self.cosine is None or len(self.cosine) < x.shape[1]:
            self.cosine = torch.outer(torch.arange(x.shape[1]), torch.arange(1, FEATURES + 1)).cos().to(x.dtype)
        return x * self.cosine[: x.shape[1]]


class Attention(nn.Module):  # type: ignore[misc]
    def __init__(self, rotary: Any, dropout: float) -> None:
        super().__init__()
        self.rotary, self.layer, self.dropout = rotary, nn.Linear(FEATURES, FEATURES), dropout

    def forward(self, x: Any) -> Any:
        turned = self.rotary(x)
        dropout = self.dropout if self.training else 0.0
        return x + self.layer(F.scaled_dot_product_attention(turned, turned, x, dropout_p=dropout))


class Encoder(nn.Module):  # type: ignore[misc]
    """All its blocks have one rotary embedding. It goes through them several times, if it is told so."""

    def __init__(self, dropout: float, rounds: int) -> None:
        super().__init__()
        rotary, self.rounds = Rotary(), rounds
        self.blocks = nn.ModuleList(Attention(rotary, dropout) for _ in range(BLOCKS))

    def forward(self, x: Any) -> Any:
        for _ in range(self.rounds):
            for block in self.blocks:
                x = block(x)
        return x


class Texts(nn.Module):  # type: ignore[misc]
    def __init__(self, dropout: float, rounds: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.head = Encoder(dropout, rounds), nn.Linear(FEATURES, FEATURES)
        self.double()

    def forward(self, x: Any) -> Any:
        return self.head(self.encoder(x))


def batch(step: int) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(2, 8, 5, FEATURES, generator=generator, dtype=torch.float64)
    return x, y


def _train(rank: int, dropout: float, how: dict[str, Any]) -> list[float]:
    """Return the losses of some steps, and of an evaluation after each."""
    losses = []
    options = group_options(heartbeat=None, microbatches=2, costs="counted", **how)
    with pipeline(Texts(dropout), batch(0)[0], F.mse_loss, **options) as run:
        optimizer = torch.optim.SGD(run.groups(), lr=0.5)
        for step in range(3):
            losses.append(run.step(*batch(step)).loss)
            optimizer.step()
            run.eval()
            losses.append(run.evaluate(*batch(step)).loss)
            run.train()
    return losses


def test_attention_without_dropout_and_with_a_shared_table_is_trained_as_in_one_process() -> None:
    model = Texts(0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    expected = []
    for step in range(3):
        x, y = batch(step)
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        expected += [loss.item(), F.mse_loss(model(x), y).item()]
    assert ranks.run(3, _train, 0.0, {"stages": 3})[0] == pytest.approx(expected, rel=1e-12)


def test_attention_with_a_shared_table_draws_the_same_wherever_the_model_is_cut() -> None:
    whole = ranks.run(2, _train, 0.5, {"stage_of": {"encoder": 0, "head": 1}})[0]
    cut = ranks.run(3, _train, 0.5, {"stages": 3})[0]
    assert whole == pytest.approx(cut, rel=1e-12)


@pytest.mark.parametrize("first", [1, 2])
def test_blocks_with_a_shared_module_are_in_the_stages_that_are_asked_for(first: int) -> None:
    """Its later calls have names below the first block's, and are made by the others."""
    found = trace_model(Texts(0.0), {"x": batch(0)[0]})
    wanted = {f"encoder.blocks.{block}": int(block >= first) for block in range(BLOCKS)}
    stages = split_model(found, wanted)
    assert len(stages) == 2
    for name, stage in wanted.items():
        own = [each for each, _ in stages[stage].module.named_parameters() if each.startswith(name)]
        assert own, name


def test_a_table_that_is_made_in_the_trace_is_no_reason_to_warn_the_user(recwarn: pytest.WarningsRecorder) -> None:
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)  # torch says only once in a process that a tensor without data is copied
    try:
        trace_model(Texts(0.0), {"x": batch(0)[0]})
    finally:
        torch.set_warn_always(always)
    assert not [each for each in recwarn if "FakeTensor" in str(each.message)]


def test_a_block_is_never_in_a_lower_stage_than_what_it_uses() -> None:
    found = trace_model(Texts(0.0), {"x": batch(0)[0]})
    with pytest.raises(PipelineError, match=r"'encoder.blocks.1.* cannot be in stage 0"):
        split_model(found, {"encoder.blocks.0": 1, "encoder.blocks.1": 0, "head": 1})


def test_each_call_of_a_block_that_shares_a_table_draws_from_a_sequence_of_its_own() -> None:
    """Its numbers follow from the name, which must be that of one call, in whatever stages the calls are."""
    traced = trace_model(Texts(0.5, rounds=2), batch(0)[0])
    second = next(node.name for node in traced.graph.nodes if "@1" in node.name)
    for placed in ({}, {second: 1}):
        stages = split_model(traced, placed)
        names = [name for each in stages for name, part in each.module.named_modules() if isinstance(part, Drawing)]
        assert len(names) == len(set(names)) == 2 * BLOCKS


def test_blocks_that_draw_and_share_a_table_run_as_they_are_in_a_module_that_must_stay_whole() -> None:
    model = Texts(0.5)
    model.encoder.register_forward_hook(lambda *_: None)
    assert trace_model(model, batch(0)[0]).leaves == {"encoder": "it has hooks"}
