"""A script's default device and type are its own affair: what the library makes for itself stays in main memory."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import everstep  # noqa: E402
from tests.checkpoint import sessions  # noqa: E402

pytestmark = pytest.mark.torch

PACKAGE = Path(everstep.__file__).parent
# The draw that torch's loader makes when an iteration begins, repeated as it makes it: on the script's default device.
REPEATED_DRAW = "torch.empty((), dtype=torch.int64).random_"
MAKERS = frozenset(
    {"arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "ones", "rand", "randint"}
    | {"randn", "randperm", "scalar_tensor", "tensor", "zeros"}
)


@pytest.fixture(params=["device", "dtype"])
def unusual_default(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Give a function that sets a default which no library expects, and take it back after the test."""
    dtype = torch.get_default_dtype()

    def set_default() -> None:
        if request.param == "device":
            torch.set_default_device("meta")
        else:
            torch.set_default_dtype(torch.float64)

    yield set_default
    torch.set_default_device(None)
    torch.set_default_dtype(dtype)


def make_training(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.rand(5, 3)).square().sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def flatten(objects: dict[str, Any]) -> list[Any]:
    moments = [each for state in objects["optimizer"].state.values() for each in state.values()]
    return [*objects["model"].state_dict().values(), *moments]


def check_equal(found: list[Any], expected: list[Any]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert (one.device.type, one.dtype) == ("cpu", other.dtype)
        assert torch.equal(one, other)


def test_a_save_and_a_restore_do_not_depend_on_the_default_device_or_type(unusual_default: Any, tmp_path: Path) -> None:
    trained, other = make_training(1), make_training(2)
    other["optimizer"] = torch.optim.Adam(other["model"].parameters())  # its moments are made by the restore
    unusual_default()
    with sessions.session(tmp_path) as ckpt:
        ckpt.track(**trained)
        ckpt.save(1)
    with sessions.session(tmp_path) as ckpt:
        assert ckpt.restore(**other).step == 1
    check_equal(flatten(other), flatten(trained))


def test_a_load_does_not_depend_on_the_default_device_or_type(unusual_default: Any, tmp_path: Path) -> None:
    trained, other = make_training(1), make_training(2)
    with sessions.session(tmp_path) as ckpt:
        ckpt.track(**trained)
        ckpt.save(1)
    unusual_default()
    loaded = everstep.load(tmp_path / "store")
    expected = trained["model"].state_dict()
    assert loaded["model"].keys() == expected.keys()
    check_equal([loaded["model"][name] for name in expected], list(expected.values()))
    everstep.load_into(tmp_path / "store", **other)
    check_equal(flatten(other), flatten(trained))


def list_makers_without_device(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text().replace(REPEATED_DRAW, "draw"))):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.func.attr not in MAKERS:
            continue
        is_torch = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
        if is_torch and "device" not in {each.arg for each in node.keywords}:
            found.append(f"{path.relative_to(PACKAGE)}:{node.lineno}")
    return found


def test_every_tensor_that_the_library_makes_names_its_device() -> None:
    files = [
        path for part in ("checkpoint", "data", "pipeline", "compat") for path in sorted((PACKAGE / part).rglob("*.py"))
    ]
    assert files
    assert [each for path in files for each in list_makers_without_device(path)] == []
