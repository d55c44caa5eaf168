"""The names are there under the package's own name, on request, as the same modules."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.compat import install


@pytest.fixture(autouse=True)
def asked_for() -> Iterator[None]:
    before, known = list(sys.meta_path), set(sys.modules)
    yield
    sys.meta_path[:] = before
    for name in set(sys.modules) - known:
        if name.startswith("smdistributed"):
            del sys.modules[name]


def test_nothing_is_there_until_it_is_asked_for() -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("smdistributed")


def test_modules_are_the_same_under_both_names() -> None:
    install()
    install()
    ours = importlib.import_module("everstep.compat.smdistributed.modelparallel.config")
    spec = ours.__spec__
    assert importlib.import_module("smdistributed.modelparallel.config") is ours
    assert ours.__spec__ is spec
    assert ours.__name__ == "everstep.compat.smdistributed.modelparallel.config"


def test_what_is_not_there_is_not_found() -> None:
    install()
    with pytest.raises(ModuleNotFoundError, match=r"smdistributed\.dataparallel"):
        importlib.import_module("smdistributed.dataparallel")


def test_tensorflow_is_refused_with_the_reason() -> None:
    install()
    with pytest.raises(ImportError, match="everstep runs pipelines of PyTorch models"):
        importlib.import_module("smdistributed.modelparallel.tensorflow")


def test_another_package_of_that_name_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "smdistributed", sys)
    with pytest.raises(ImportError, match="smdistributed is installed"):
        install()


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_process_that_a_script_spawns_has_the_names_too(tmp_path: Path, method: str) -> None:
    """As a worker of a data loader: it imports the script anew, and nobody tells it how that was started."""
    script = tmp_path / "train.py"
    script.write_text(
        "import multiprocessing, sys\n"
        "import smdistributed.modelparallel as smp\n"
        "def work(answer):\n"
        "    answer.put((smp.__name__, smp.__version__, sys.argv[1:]))\n"
        "if __name__ == '__main__':\n"
        "    context = multiprocessing.get_context(sys.argv[1])\n"
        "    answer = context.SimpleQueue()\n"
        "    child = context.Process(target=work, args=(answer,))\n"
        "    child.start(); child.join()\n"
        "    print(child.exitcode, answer.get() if child.exitcode == 0 else None)\n"
    )
    told = subprocess.run(
        [sys.executable, "-m", "everstep.compat", str(script), method], capture_output=True, text=True, timeout=60
    )
    name = "everstep.compat.smdistributed.modelparallel"
    assert told.stdout.startswith(f"0 ('{name}', "), told.stderr


def test_a_script_runs_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("HERE = True\n")
    script = tmp_path / "train.py"
    script.write_text(
        "import sys\n"
        "from beside import HERE\n"
        "from smdistributed.modelparallel import __version__\n"
        "if __name__ == '__main__':\n"
        "    print(HERE, sys.argv[1:], __version__ >= '1.10')\n"
    )
    told = subprocess.run(
        [sys.executable, "-m", "everstep.compat", str(script), "--lr", "1"], capture_output=True, text=True, timeout=60
    )
    assert (told.stdout, told.stderr) == ("True ['--lr', '1'] True\n", "")
