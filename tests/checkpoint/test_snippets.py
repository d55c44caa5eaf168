"""The code that the page on checkpoints shows runs as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import everstep  # noqa: E402
from everstep.checkpoint.store.posix import PosixStore  # noqa: E402
from tests.checkpoint import ranks  # noqa: E402

pytestmark = pytest.mark.torch

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "checkpoints.md"


def snippets(title: str) -> list[str]:
    """The Python of the section with this title, and of those below it."""
    (section,) = re.findall(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    found = re.findall(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    assert found, title
    return found


def network(name: str) -> Any:
    return nn.Sequential(OrderedDict([(name, nn.Linear(4, 4))]))


def test_the_snippets_on_reading_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = tmp_path / "run"
    ranks.save(PosixStore(store), ranks.key(7), {"model": network("backbone")})
    names: dict[str, Any] = {"everstep": everstep, "torch": torch, "model": network("backbone")}
    *reading, into_another = [each.replace("s3://bucket/run", str(store)) for each in snippets("Read a checkpoint")]
    for snippet in reading:
        exec(snippet, names)
    assert names["state"].step == 7
    names["model"] = network("encoder").to(torch.bfloat16)
    exec(into_another, names)
    assert (names["restored"].missing, names["restored"].unexpected) == ((), ())
    assert "0.1" in capsys.readouterr().out


def test_the_snippets_on_an_older_step_and_metadata_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, model = tmp_path / "run", network("layer")
    monkeypatch.setenv("EVERSTEP_CHECKPOINT_MEMORY", str(tmp_path / "memory"))
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    for step in (500, 1000):
        ranks.save(PosixStore(store), ranks.key(step), {"model": model, "scheduler": scheduler})
    names: dict[str, Any] = {"everstep": everstep, "model": model, "scheduler": scheduler}
    for snippet in snippets("Restore an older step"):
        exec(snippet.replace("s3://bucket/run", str(store)), names)
    assert names["state"].step == 501
    assert names["state"].metadata == {"learning_rate": 0.5, "loss": 0.25}


def test_the_snippets_on_other_libraries_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ranks.save(PosixStore("run"), ranks.key(3), {"model": network("layer")})
    for snippet in snippets("Exchange with other libraries"):
        exec(snippet.replace("s3://bucket/", ""), {"torch": torch})
    assert (tmp_path / "out" / "model.safetensors").exists()
    assert everstep.load("new").step == 7


def test_what_the_page_takes_from_everstep_is_there_after_its_import() -> None:
    names = sorted(
        set(re.findall(r"\beverstep((?:\.[A-Za-z_]+)+)\(", "\n".join(snippets("Save and restore with PyTorch"))))
    )
    assert ".data.Sampler" in names
    code = "; ".join(["import everstep", *(f"everstep{name}" for name in names)])
    subprocess.run([sys.executable, "-c", code], check=True)
