"""Kinds of NumPy's arrays and scalars whose bytes are not all that they are: refused by name, never changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from everstep.checkpoint.errors import CheckpointError  # noqa: E402
from everstep.checkpoint.format.values import pack_value, unpack_value  # noqa: E402
from everstep.checkpoint.state.flat import flatten_objects  # noqa: E402
from tests.checkpoint.sessions import session  # noqa: E402

pytestmark = pytest.mark.torch


class Own(np.float64):
    """A scalar of the script's own."""


class OwnArray(np.ndarray[Any, Any]):
    """An array of the script's own."""


FIELDS: list[Any] = [("a", "<i4"), ("b", "<f8")]
RECORDS = np.rec.array([(1, 2.0)] * 200, dtype=FIELDS)
INNER = np.dtype([("inner", np.dtype((np.record, FIELDS)))])

KINDS: dict[str, tuple[Any, str]] = {
    "record": (RECORDS[0], "record"),
    "recarray": (RECORDS, "recarray"),
    "array-of-records": (np.asarray(RECORDS), "array of numpy.record"),
    "few-of-records": (np.asarray(RECORDS)[:2], "array of numpy.record"),
    "records-in-fields": (np.zeros(200, INNER), "array of numpy.record"),
    "matrix": (np.matrix([[1.0, 2.0]] * 200), "matrix"),
    "masked": (np.ma.masked_array([1.0, 2.0], [True, False]), "MaskedArray"),
    "masked-large": (np.ma.masked_array([1.0] * 400, [True] * 400), "MaskedArray"),
    "masked-element": (np.ma.masked, "MaskedConstant"),
    "own-scalar": (Own(1.5), "Own"),
    "own-array": (np.zeros(400).view(OwnArray), "OwnArray"),
}


class Holding(nn.Module):  # type: ignore[misc]  # torch is not where types are checked
    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def in_optimizer(value: Any) -> Any:
    param = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([param])
    optimizer.state[param]["held"] = value
    return optimizer


PLACES: dict[str, Callable[[Any], Any]] = {
    "itself": lambda value: value,
    "dictionary": lambda value: {"key": value},
    "beside-a-tensor": lambda value: {"key": [torch.ones(1), {"deep": value}]},
    "in-one-value": lambda value: {"key": [{1: (value,)}]},
    "extra-state": Holding,
    "optimizer": in_optimizer,
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize(("value", "shown"), KINDS.values(), ids=KINDS)
def test_what_would_come_back_as_something_else_is_refused_by_its_name(
    value: Any, shown: str, place: Callable[[Any], Any]
) -> None:
    with pytest.raises(CheckpointError, match=rf"^held.*{shown}"):
        flatten_objects({"held": place(value)}, rank=0)


@pytest.mark.parametrize("kind", ["record", "array-of-records", "matrix", "masked"])
def test_a_pickle_that_is_allowed_gives_back_the_very_kind(kind: str) -> None:
    value, _ = KINDS[kind]
    found = unpack_value(pack_value(value, allow_pickle=True), allow_pickle=True)
    assert type(found) is type(value)
    assert found.dtype.type is value.dtype.type
    assert repr(found) == repr(value)


@pytest.mark.parametrize("count", [2, 200])
def test_plain_structures_come_back_as_they_were(count: int, tmp_path: Path) -> None:
    aligned = np.dtype("i1,f8", align=True)
    held = {"array": np.ones(count, FIELDS), "scalar": np.ones(1, FIELDS)[0], "aligned": np.ones(count, aligned)}
    with session(tmp_path) as ckpt:
        ckpt.restore(held=held)
        ckpt.save(1)
    found: dict[str, Any] = {"array": np.zeros(count, FIELDS), "scalar": None, "aligned": None}
    with session(tmp_path) as ckpt:
        ckpt.restore(held=found)
    for key, value in held.items():
        assert (found[key] == value).all()
        assert found[key].dtype == value.dtype
        assert type(found[key]) is type(value)


def test_a_record_that_a_script_holds_is_replaced_by_the_saved_one(tmp_path: Path) -> None:
    records = np.array([(1, 2.0), (3, 4.0)], FIELDS)
    with session(tmp_path) as ckpt:
        ckpt.restore(state={"record": records[1]})
        ckpt.save(1)
    state = {"record": records[0]}
    with session(tmp_path) as ckpt:
        ckpt.restore(state=state)
    assert type(state["record"]) is np.void
    assert state["record"] == records[1]
    assert records[0].tolist() == (1, 2.0)
