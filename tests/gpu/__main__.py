"""`make test-gpu`: on every GPU of this machine. `--on-cpu` tries the tests themselves where there is none."""

from __future__ import annotations

import os
import sys
from pathlib import Path

HERE = Path(__file__).parent


def main(arguments: list[str]) -> int:
    import pytest
    import torch

    on_cpu = "--on-cpu" in arguments
    if not on_cpu and not torch.cuda.is_available():
        print(
            f"make test-gpu: torch {torch.__version__} in {sys.executable} finds no NVIDIA GPU on this machine. Run it "
            "where `nvidia-smi` lists one, with a torch that is built for CUDA (PYTHON=python3: another Python).",
            file=sys.stderr,
        )
        return 2
    os.environ["EVERSTEP_TEST_DEVICE"] = "cpu" if on_cpu else "cuda"
    if not on_cpu:
        for index in range(torch.cuda.device_count()):
            print(f"cuda:{index}: {torch.cuda.get_device_name(index)}")
    rest = [each for each in arguments if each != "--on-cpu"]
    places = ["-c", str(HERE / "pytest.ini"), "--rootdir", str(HERE.parents[1]), "--confcutdir", str(HERE), str(HERE)]
    return int(pytest.main([*places, "-m", "not cuda_only" if on_cpu else "gpu", *rest]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
