"""Every name of torch that the library uses is there: types do not tell, where torch deletes a module that it has."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("torch")

import everstep

pytestmark = pytest.mark.torch

ROOT = Path(everstep.__file__).parent
FILES = sorted(each for each in ROOT.rglob("*.py") if "torch" in each.read_text() and "agent" not in each.parts)


def missing_names(source: str) -> list[str]:
    """The dotted names of torch's modules in this source that are not there."""
    tree = ast.parse(source)
    modules: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    found = importlib.import_module(alias.name)
                    modules[alias.asname or "torch"] = found if alias.asname else importlib.import_module("torch")
    chains = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return sorted(chain for chain in chains if _is_missing(chain, modules))


def _is_missing(chain: str, modules: dict[str, Any]) -> bool:
    first, *rest = chain.split(".")
    found = modules.get(first)
    if found is None or not all(each.isidentifier() for each in rest):
        return False
    for name in rest:
        if not isinstance(found, ModuleType | type):
            return False
        if not hasattr(found, name):
            return True
        found = getattr(found, name)
    return False


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_name_of_torch_is_there(path: Path) -> None:
    assert not missing_names(path.read_text())


def test_a_name_that_torch_deletes_is_found() -> None:
    """No state on a GPU could be saved for it once."""
    source = "import torch\ntorch.optim.optimizer.register_optimizer_step_pre_hook(print)\ntorch.optim.SGD\n"
    assert missing_names(source) == ["torch.optim.optimizer", "torch.optim.optimizer.register_optimizer_step_pre_hook"]
