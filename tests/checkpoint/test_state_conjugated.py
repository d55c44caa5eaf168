"""Tensors that torch conjugates or negates when they are read are saved and loaded as the values that they show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import everstep  # noqa: E402
from everstep.checkpoint.store.posix import PosixStore  # noqa: E402
from tests.checkpoint import ranks  # noqa: E402
from tests.checkpoint.sessions import session  # noqa: E402

pytestmark = pytest.mark.torch

FORMS = ["plain", "conjugated", "negated", "transposed", "expanded", "scalar", "negated-scalar"]


def made(form: str, seed: int) -> Any:
    """Return a tensor of one form; the plain one has the shape and type of all but the negated."""
    generator = torch.Generator().manual_seed(seed)
    given = torch.complex(*torch.rand(2, 3, 3, generator=generator))
    return {
        "plain": lambda: given,
        "conjugated": lambda: given.conj(),
        "negated": lambda: given.conj().imag,
        "transposed": lambda: given.mH,
        "expanded": lambda: given[:1].clone().conj().expand(3, 3),
        "scalar": lambda: given[0, 0].clone().conj(),
        "negated-scalar": lambda: given.conj().imag[0, 0],
    }[form]()


class Holding(nn.Module):  # type: ignore[misc]  # torch is not where types are checked
    def __init__(self, tensor: Any) -> None:
        super().__init__()
        self.register_buffer("buffer", tensor)
        self.parameter = nn.Parameter(tensor)


def check_same(one: Any, other: Any) -> None:
    assert torch.equal(one.resolve_conj().resolve_neg(), other.resolve_conj().resolve_neg())


PAIRS = [(form, form) for form in FORMS[1:]] + [
    ("conjugated", "plain"),
    ("plain", "conjugated"),
    ("plain", "transposed"),
    ("transposed", "conjugated"),
    ("expanded", "conjugated"),
    ("negated", "real"),
    ("real", "negated"),
]


def pair(saved: str, live: str) -> tuple[Any, Any]:
    return tuple(
        made("negated", seed).clone() if form == "real" else made(form, seed) for seed, form in ((1, saved), (2, live))
    )


@pytest.mark.parametrize("way", ["restore", "load_into"])
@pytest.mark.parametrize(("saved", "live"), PAIRS)
def test_values_come_back_whatever_the_form_here_and_there(saved: str, live: str, way: str, tmp_path: Path) -> None:
    theirs, ours = pair(saved, live)
    ranks.save(PosixStore(tmp_path), ranks.key(1), {"model": Holding(theirs), "value": {"key": theirs}})
    objects: dict[str, Any] = {"model": Holding(ours), "value": {"key": ours.clone() if live == "real" else ours}}
    if way == "restore":
        ranks.restore(tmp_path, tmp_path / "memory", objects)
    else:
        everstep.load_into(tmp_path, **objects)
    for found in (objects["model"].buffer, objects["model"].parameter, objects["value"]["key"]):
        check_same(found, theirs)
    check_same(everstep.load(tmp_path)["model"]["buffer"], theirs)


@pytest.mark.parametrize("form", FORMS)
def test_a_session_saves_the_values_that_a_tensor_shows(form: str, tmp_path: Path) -> None:
    theirs, ours = pair(form, form)
    with session(tmp_path) as ckpt:
        ckpt.restore(model=Holding(theirs))
        ckpt.save(1)
    model = Holding(ours)
    with session(tmp_path) as ckpt:
        assert ckpt.restore(model=model).step == 1
    check_same(model.buffer, theirs)
    check_same(everstep.load(tmp_path / "store")["model"]["parameter"], theirs)


def test_a_tensor_and_its_conjugate_are_no_tied_weights(tmp_path: Path) -> None:
    def both(seed: int) -> Any:
        model = nn.Module()
        given = made("plain", seed)
        model.register_buffer("one", given)
        model.register_buffer("other", given.conj())
        return model

    saved, model = both(1), both(2)
    ranks.save(PosixStore(tmp_path), ranks.key(1), {"model": saved})
    ranks.restore(tmp_path, tmp_path / "memory", {"model": model})
    check_same(model.one, saved.one)
    check_same(model.other, saved.other)
