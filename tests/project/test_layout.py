"""Traps of this repository's own shape."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_operator_folder_is_no_package() -> None:
    """`operator/__init__.py` would shadow the standard library for whoever starts Python in the root."""
    assert not (ROOT / "operator" / "__init__.py").exists()
    subprocess.run([sys.executable, "-c", "import collections, operator; operator.eq"], cwd=ROOT, check=True)


def test_the_library_imports_without_its_extras() -> None:
    """A rank imports `everstep` for one call: it must cost next to nothing and need nothing."""
    heavy = "{'torch', 'pydantic', 'kubernetes', 'typer'}"
    source = f"import sys, everstep; sys.exit(str({heavy} & set(sys.modules)) if {heavy} & set(sys.modules) else 0)"
    subprocess.run([sys.executable, "-c", source], check=True)
