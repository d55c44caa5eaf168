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


def test_the_names_of_an_optimizers_parameters_are_read_from_a_file(everstep: Everstep, tmp_path: Path) -> None:
    state = {"weight": torch.rand(3, 3), "bias": torch.rand(3)}
    params = [torch.nn.Parameter(state["bias"].clone()), torch.nn.Parameter(state["weight"].clone())]
    optimizer = torch.optim.AdamW([{"params": params[:1], "weight_decay": 0.0}, {"params": params[1:]}])
    torch.save({"model": state, "optimizer": optimizer.state_dict()}, tmp_path / "x.pt")
    done = everstep("checkpoint", "import", "x.pt", "run", "--from", "torch")
    assert done.returncode == 1
    assert "they are in 2 groups" in done.stderr
    assert "--optimizer-order FILE" in done.stderr
    (tmp_path / "order").write_text("bias\nweight\n")
    done = everstep("checkpoint", "import", "x.pt", "run", "--from", "torch", "--optimizer-order", "order")
    assert (done.returncode, done.stdout.strip()) == (0, "x.pt is imported as 0.1-0")
    done = everstep("checkpoint", "import", "x.pt", "run", "--from", "huggingface", "--optimizer-order", "order")
    assert done.returncode == 2
    assert "huggingface holds no optimizer" in done.stderr
