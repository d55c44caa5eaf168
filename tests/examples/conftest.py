"""Where the examples run: in this Python if it has torch, else in the trainer image if that is built."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from e2e.images.catalogue import Image, image
from e2e.images.errors import ImageError

EXAMPLES = Path(__file__).parents[2] / "examples"
TORCHRUN = ("python", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


@dataclass(frozen=True)
class Trainer:
    """Runs a command that may name files by `examples` and `output`; both are also on this machine."""

    examples: str
    output: str
    image: Image | None
    folder: Path

    def run(self, *command: str) -> str:
        """What the command printed; it must succeed."""
        command = ("env", f"SM_MODEL_DIR={self.output}", "OMP_NUM_THREADS=1", *command)
        if self.image is not None:
            return self.image.run(*command, mounts={self.folder: self.output})
        words = [sys.executable if word == "python" else word for word in command]
        return subprocess.run(words, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def trainer(tmp_path: Path, request: pytest.FixtureRequest) -> Trainer:
    """`@pytest.mark.parametrize("trainer", [...], indirect=True)` names further modules that the test needs."""
    needed = ("torch", *getattr(request, "param", ()))
    if all(importlib.util.find_spec(module) for module in needed):
        return Trainer(str(EXAMPLES), str(tmp_path), None, tmp_path)
    tmp_path.chmod(0o777)  # the image's user is another
    candidate = image("trainer")
    try:
        built = candidate.built
    except ImageError as error:
        pytest.skip(str(error))
    if not built:
        pytest.skip(f"no {needed} here, and the trainer image is not built: `python -m e2e.images build trainer`")
    return Trainer("/opt/everstep/examples", "/mnt", candidate, tmp_path)
