"""Examples run in this Python if it has torch, else in the trainer image if that is built."""

from __future__ import annotations

import importlib.util
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from e2e.images.catalogue import Image, image
from e2e.images.errors import ImageError

EXAMPLES = Path(__file__).parents[2] / "examples"


def torchrun(processes: int) -> tuple[str, ...]:
    """Starts so many ranks; by an address, since a container's own name does not always resolve."""
    rendezvous = ("--master-addr=127.0.0.1", f"--master-port={free_port()}")
    return ("python", "-m", "torch.distributed.run", *rendezvous, f"--nproc-per-node={processes}")


def free_port() -> int:
    """A TCP port that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


@dataclass(frozen=True)
class Trainer:
    """Runs a command that may name files by `examples` and `output`; both are also on this machine."""

    examples: str
    output: str
    image: Image | None
    folder: Path

    def run(self, *command: str) -> str:
        """Return what the command printed; it must succeed."""
        # The limit ends what runs inside a container too, and before the test's own does.
        command = ("timeout", "750", "env", f"SM_MODEL_DIR={self.output}", "OMP_NUM_THREADS=1", *command)
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
    short = "trainer-horovod" if "horovod" in needed else "trainer"
    candidate = image(short)
    try:
        exists = candidate.exists
    except ImageError as error:
        pytest.skip(str(error))
    if not exists:
        pytest.skip(f"no {', '.join(needed)} here, and there is no image {short}: `python -m e2e.images build {short}`")
    return Trainer("/opt/everstep/examples", "/mnt", candidate, tmp_path)
