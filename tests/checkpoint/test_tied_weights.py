"""Weights that a model ties are one tensor: a checkpoint that has them under one of their names has all of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import everstep  # noqa: E402
from everstep.checkpoint.exchange import importing  # noqa: E402
from everstep.checkpoint.state.kinds import StateMismatch  # noqa: E402
from everstep.checkpoint.store.posix import PosixStore  # noqa: E402
from tests.checkpoint import ranks  # noqa: E402
from tests.checkpoint.sessions import session  # noqa: E402

pytestmark = pytest.mark.torch


def network(seed: int, *, is_tied: bool = True, size: int = 4) -> Any:
    torch.manual_seed(seed)
    model = nn.Module()
    model.embed = nn.Embedding(size, 3)
    model.head = nn.Linear(3, size, bias=False)
    if is_tied:
        model.head.weight = model.embed.weight
    return model


def untied(name: str, tensor: Any) -> Any:
    """Return a module that has nothing but a tensor of this name."""
    model = nn.Module()
    owner, _, last = name.partition(".")
    model.add_module(owner, nn.Module())
    model.get_submodule(owner).register_buffer(last, tensor)
    return model


def by_restore(folder: Path, model: Any) -> Any:
    with session(folder) as ckpt:
        return ckpt.restore(model=model)


def by_load_into(folder: Path, model: Any) -> Any:
    return everstep.load_into(folder / "store", model=model)


WAYS = [by_restore, by_load_into]


@pytest.mark.parametrize("load", WAYS)
@pytest.mark.parametrize("name", ["embed.weight", "head.weight"])
def test_one_name_of_tied_weights_is_enough(name: str, load: Callable[..., Any], tmp_path: Path) -> None:
    """As transformers' save_pretrained() writes them, and safetensors' save_model()."""
    saved = torch.rand(4, 3)
    ranks.save(PosixStore(tmp_path / "store"), ranks.key(1), {"model": untied(name, saved)})
    model = network(1)
    assert load(tmp_path, model).missing == ()
    assert torch.equal(model.embed.weight, saved)
    assert model.head.weight is model.embed.weight


@pytest.mark.parametrize("load", WAYS)
def test_one_name_is_not_enough_for_weights_that_are_two(load: Callable[..., Any], tmp_path: Path) -> None:
    ranks.save(PosixStore(tmp_path / "store"), ranks.key(1), {"model": untied("embed.weight", torch.rand(4, 3))})
    model = network(1, is_tied=False)
    before = model.embed.weight.clone()
    with pytest.raises(StateMismatch, match=r"model\.head\.weight is not in the checkpoint"):
        load(tmp_path, model)
    assert torch.equal(model.embed.weight, before)


@pytest.mark.parametrize("load", WAYS)
def test_tied_weights_without_elements_are_one_too(load: Callable[..., Any], tmp_path: Path) -> None:
    """A rank may have no element of what is sharded, and no memory by which to tell."""
    ranks.save(PosixStore(tmp_path / "store"), ranks.key(1), {"model": untied("embed.weight", torch.rand(0, 3))})
    assert load(tmp_path, network(1, size=0)).missing == ()


def test_what_transformers_has_saved_is_restored_after_an_import(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=32, n_positions=8, n_embd=8, n_layer=1, n_head=1)
    torch.manual_seed(1)
    theirs = GPT2LMHeadModel(config)
    theirs.save_pretrained(tmp_path / "folder")
    importing.import_safetensors(tmp_path / "folder", tmp_path / "store")
    ours = GPT2LMHeadModel(config)
    assert by_restore(tmp_path, ours).missing == ()
    assert ranks.same(ours.state_dict(), theirs.state_dict())
    assert ours.lm_head.weight is ours.transformer.wte.weight
