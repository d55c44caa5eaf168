"""The page of pipelines: its snippets run as they are printed, and what it says of losses inside a model is so."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from tests.checkpoint.ranks import run  # noqa: E402

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "pipelines.md").read_text()
TRAINS, OWN = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
(ACTIONS,) = re.findall(r"^```text\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def test_a_schedule_of_ones_own_is_proven_and_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.txt").write_text(ACTIONS)
    exec(OWN, {})
    assert capsys.readouterr().out.startswith("rank 0 |F0|F1|")


def _script(rank: int, store: str) -> tuple[float, int]:
    torch.manual_seed(0)
    data = [(torch.randn(64, 8), torch.randn(64, 8)) for _ in range(2)]

    def part_of(step: int, replica: int, replicas: int) -> Any:
        return tuple(each.chunk(replicas)[replica] for each in data[step])

    around: dict[str, Any] = {
        "model": nn.Sequential(*(nn.Linear(8, 8) for _ in range(6))),
        "loss": lambda output, target: ((output - target).square().sum(), target.numel()),
        "loader": data,
        "part_of": part_of,
        "steps": len(data),
    }
    exec(TRAINS.replace("dist.init_process_group()", "").replace("s3://bucket/run", store), around)
    return around["output"].loss, around["start"].step


def test_the_script_trains(tmp_path: Path) -> None:
    (loss, start), *others = run(2, _script, str(tmp_path / "store"), timeout=110)
    assert others == [(loss, start)]
    assert (loss, start) == (pytest.approx(1.0, abs=0.3), 0)


def _gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(vocab_size=20, n_positions=8, n_embd=8, n_layer=2, n_head=2, use_cache=False, **none)
    return GPT2LMHeadModel(config).double()


def _text() -> Any:
    ids = torch.randint(20, (6, 8), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[4:, 2:] = -100
    return ids, labels


def _inside(rank: int) -> dict[str, Any]:
    from everstep.pipeline import EngineOptions, PlanOptions, pipeline

    ids, labels = _text()
    batch = {"input_ids": ids, "labels": labels}
    with pipeline(
        _gpt2(),
        batch,
        lambda output, labels: output["loss"],
        stages=2,
        microbatches=3,
        plan=PlanOptions(costs="counted"),
        engine=EngineOptions(loss_weight=lambda output, labels: (labels[:, 1:] != -100).sum()),
    ) as piped:
        loss = piped.step(batch, labels).loss
        return {"": loss, **{name: each.grad for name, each in piped.named_parameters()}}


def test_a_model_that_computes_its_loss_itself_trains_as_the_page_says() -> None:
    ids, labels = _text()
    model = _gpt2()
    loss = model(input_ids=ids, labels=labels)["loss"]
    loss.backward()
    expected = {name: each.grad for name, each in model.named_parameters()}
    for found in run(2, _inside, timeout=110):
        assert found.pop("") == pytest.approx(loss.item(), rel=1e-6)  # the model's own loss is in float32
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-7)
