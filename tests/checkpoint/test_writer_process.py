"""The process of a writer: how it starts and ends, who reaches it, and what it imports."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import everstep
from everstep.checkpoint.catalog.candidates import list_candidates
from everstep.checkpoint.writer import control
from everstep.checkpoint.writer.control import WriterLost
from tests.checkpoint.builders import key
from tests.checkpoint.writers import PATIENCE, Site, until


def test_a_writer_that_is_told_to_stop_finishes_first(site: Site) -> None:
    node = site.node()
    node.save(key(10))
    os.kill(node.pid, signal.SIGTERM)
    node.die()
    until(lambda: not node.runs, "the writer has ended")
    assert site.good(key(10))


def test_signals_for_the_ranks_do_not_reach_it(site: Site) -> None:
    node = site.node()
    assert os.getsid(node.pid) == node.pid
    for number in (signal.SIGINT, signal.SIGHUP):
        os.kill(node.pid, number)
    node.save(key(10))
    node.report("saved")


def test_nobody_else_can_reach_it(site: Site) -> None:
    node = site.node()
    assert node.directory.stat().st_mode & 0o777 == 0o700
    assert (node.directory / control.SOCKET).stat().st_mode & 0o777 == 0o600


def test_a_writer_runs_in_a_directory_only_once(site: Site) -> None:
    node = site.node()
    second = control.start_writer(node.directory, linger=0.1, patience=0.2)
    assert second.wait(PATIENCE) != 0
    node.save(key(10))
    node.report("saved")


def test_a_writer_that_cannot_start_is_told_with_its_own_words(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(site.folder))
    (site.folder / "asyncio.py").write_text("raise ImportError('no asyncio today')")
    with pytest.raises(WriterLost, match="no asyncio today"):
        site.node()


@pytest.mark.parametrize("how", ["relative PYTHONPATH", "sys.path"])
def test_it_starts_wherever_the_rank_found_its_packages(tmp_path: Path, how: str) -> None:
    """None of them is installed: as with a checkout, or packages that a script or a job adds to its path by itself."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own/everstep").symlink_to(Path(str(everstep.__file__)).parent)
    (tmp_path / "json.py").write_text("raise ImportError('a module of the script')")
    packages = sysconfig.get_path("purelib")
    added = [str(tmp_path / "own"), packages, str(tmp_path)] if how == "sys.path" else []
    script = f"""
import json, sys
from pathlib import Path
sys.path += {added}
from everstep.checkpoint.writer import control
control.ensure_writer(Path("memory").absolute(), linger=0.1)
"""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if not added:
        environ["PYTHONPATH"] = os.pathsep.join(["own", os.path.relpath(packages, tmp_path)])
    python = Path(sys.base_prefix, "bin", "python3")  # without the packages of this environment
    subprocess.run([python, "-P", "-c", script], cwd=tmp_path, env=environ, check=True, timeout=120)


def test_it_never_imports_torch(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of that name in its path would say that it was imported; what a writer imports is all it can carry."""
    told = site.folder / "imported"
    for name in ("torch", "numpy"):
        (site.folder / f"{name}.py").write_text(f"import pathlib; pathlib.Path({str(told)!r}).write_text({name!r})")
    monkeypatch.setenv("PYTHONPATH", str(site.folder))
    node = site.node(keep_last=1)
    for step in (10, 20):
        node.save(key(step))
        node.report("saved")
    until(lambda: list_candidates(site.store) == [key(20)], "retention has run")
    assert not told.exists(), f"the writer imported {told.read_text()}"
    assert "libtorch" not in Path(f"/proc/{node.pid}/maps").read_text()
