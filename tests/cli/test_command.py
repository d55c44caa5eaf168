"""The command as a whole: quick to answer, clear about what it lacks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

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


@pytest.mark.parametrize("text", ["clusters: [\n", "a text\n"])
def test_a_kubeconfig_that_cannot_be_read_is_told_in_one_message(
    everstep_process: Everstep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    (tmp_path / "kubeconfig").write_text(text)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    done = everstep_process("status", "j")
    assert done.returncode == 1
    assert done.stderr.startswith("everstep: the kubeconfig cannot be read: ")
    assert "Traceback" not in done.stderr


def test_characters_that_the_output_s_encoding_lacks_are_escaped() -> None:
    source = (
        "import sys\n"
        "from everstep.cli import main\n"
        "sys.argv = ['everstep', 'version']\n"
        "try:\n    main()\nexcept SystemExit: pass\n"
        "from everstep.cli.terminal import make_stdout\n"
        "make_stdout().print('loss \\u2588')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONIOENCODING": "latin-1"},
    )  # fmt: skip
    assert done.stdout.splitlines()[1:] == ["loss \\u2588"], done.stderr


def test_an_output_without_room_is_told_in_one_line(tmp_path: Path) -> None:
    manifest = tmp_path / "job.yaml"
    manifest.write_text(
        "apiVersion: everstep.dev/v1alpha1\nkind: TrainingJob\nmetadata: {name: digits}\nspec: {image: x}\n"
    )
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "everstep.cli", "validate", "-f", str(manifest)],
            stdout=full, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr == "everstep: the output cannot be written: No space left on device: make room there\n"


@pytest.mark.parametrize(
    ("field", "named"),
    [
        ('command: [echo, a], env: [{name: MINE, value: "a\\0b"}]', "the variable MINE"),
        ('command: [echo, "a\\0b"]', "the command of digits"),
        ('command: [echo], args: ["a\\0b"]', "the command of digits"),
    ],
)
def test_a_run_names_what_no_process_can_get(everstep: Everstep, tmp_path: Path, field: str, named: str) -> None:
    manifest = tmp_path / "job.yaml"
    manifest.write_text(
        "apiVersion: everstep.dev/v1alpha1\nkind: TrainingJob\nmetadata: {name: digits}\n"
        f"spec: {{image: x, {field}}}\n"
    )
    done = everstep("run", "-f", str(manifest))
    assert done.returncode == 1
    assert f"{named} " in done.stderr
    assert "NUL" in done.stderr
