"""The command as a whole: quick to answer, clear about what it lacks."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.cli.command import Done

Everstep = Callable[..., Done]

HEAVY = ("rich", "yaml", "pydantic", "kubernetes", "torch", "everstep_operator")


def test_help_names_every_command_and_loads_nothing_that_it_does_not_need() -> None:
    source = (
        "import sys\n"
        "from everstep.cli import main\n"
        "sys.argv = ['everstep', '--help']\n"
        "try:\n    main()\nexcept SystemExit: pass\n"
        f"print('LOADED', sorted(set({HEAVY!r}) & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    for command in ("validate", "run", "status", "logs", "version"):
        assert f"\n  {command} " in done.stdout
    assert "LOADED []" in done.stdout


def test_version_is_the_distribution_s(everstep: Everstep) -> None:
    from importlib.metadata import version

    assert everstep("version").stdout == version("everstep") + "\n"


def test_without_the_kubernetes_client_it_says_what_to_install() -> None:
    source = (
        "import sys\n"
        "sys.modules['kubernetes'] = None\n"
        "from everstep.cli import main\n"
        "sys.argv = ['everstep', 'status', 'j']\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "pip install 'everstep[operator]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_without_a_cluster_it_says_so(everstep_process: Everstep, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", "/nonexistent")
    done = everstep_process("logs", "j")
    assert done.returncode == 1
    assert "no cluster is configured" in done.stderr
    assert "Traceback" not in done.stderr
