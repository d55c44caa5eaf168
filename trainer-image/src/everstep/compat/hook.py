"""An import hook that finds the modules of one package under the name of another."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

NAMES = Path(__file__).with_name("names")  # a folder for sys.path, with a module for each name that can be installed


def install_names(name: str, target: str) -> None:
    """Let `import name` and below give `target` and below, the same module objects. Doing it twice is doing it once.

    Raises:
        ImportError: `name` can be imported already.
    """
    if any(isinstance(finder, _AliasFinder) and finder.name == name for finder in sys.meta_path):
        return
    if name in sys.modules or not _is_free(name):
        raise ImportError(f"{name} is installed: everstep does not take its place", name=name)
    sys.meta_path.insert(0, _AliasFinder(name, target))


def _is_free(name: str) -> bool:
    """Return whether nothing is found by this name, or only what leads here."""
    found = importlib.util.find_spec(name)
    return found is None or (found.origin is not None and Path(found.origin).parent == NAMES)


class _AliasFinder(MetaPathFinder):
    def __init__(self, name: str, target: str) -> None:
        self.name, self.target = name, target

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name and not fullname.startswith(f"{self.name}."):
            return None
        real = self.target + fullname.removeprefix(self.name)
        found = importlib.util.find_spec(real)
        if found is None:
            return None
        return ModuleSpec(fullname, _AliasLoader(real), is_package=found.submodule_search_locations is not None)


class _AliasLoader(Loader):
    """A loader that gives the module of another name, which is left as it is."""

    def __init__(self, real: str) -> None:
        self._real = real

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._real)
        # The import system writes the spec of the alias into the module; the real one is put back in exec_module.
        self._spec, self._loader, self._package = module.__spec__, module.__loader__, module.__package__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__, module.__loader__, module.__package__ = self._spec, self._loader, self._package
