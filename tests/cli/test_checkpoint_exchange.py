"""`everstep checkpoint export` and `import` as a user runs them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.command import Done

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.torch

Everstep = Callable[..., Done]


def test_a_file_of_torch_becomes_a_folder_of_hugging_face(everstep: Everstep, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    state = {"one.weight": torch.rand(3, 2), "two.weight": torch.rand(4)}
    torch.save({"model_state_dict": state}, tmp_path / "x.pt")
    (tmp_path / "config.json").write_text("{}")
    done = everstep("checkpoint", "import", "x.pt", "run", "--from", "torch", "--step", "12")
    assert (done.returncode, done.stdout.strip()) == (0, "x.pt is imported as 0.1-12")
    options = ("--to", "huggingface", "--config", "config.json", "--rename", "one.=first.", "--dtype", "bfloat16")
    done = everstep("checkpoint", "export", "run", "out", *options)
    assert (done.returncode, done.stdout.strip()) == (0, "0.1-12 is exported to out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(found["first.weight"], state["one.weight"].bfloat16())
    assert (tmp_path / "out" / "config.json").read_text() == "{}"
    done = everstep("checkpoint", "export", "run", "out", "--to", "huggingface")
    assert done.returncode == 1
    assert "out is there already" in done.stderr
    done = everstep("checkpoint", "export", "run", "other", "--to", "safetensors", "--key", "13")
    assert done.returncode == 3
    assert "there is no checkpoint 13" in done.stderr
