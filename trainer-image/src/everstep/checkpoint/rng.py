"""The random generators of a rank: Python's, NumPy's, torch's for the processor and for the rank's own GPU."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


class Rng:
    """The state of this process's generators; wrap it in PerRank, since each rank draws its own numbers.

    Of GPUs only the current device's: a rank uses one, and asking for another would start CUDA on it.
    """

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"python": random.getstate(), "torch": _to_bytes(torch.get_rng_state())}
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            state["numpy"] = numpy.random.get_state(legacy=False)
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            state["cuda"] = _to_bytes(torch.cuda.get_rng_state())
        return {"generators": [state]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        (generators,) = state["generators"]
        random.setstate(generators["python"])
        torch.set_rng_state(_to_tensor(generators["torch"]))
        if "numpy" in generators:
            import numpy

            numpy.random.set_state(generators["numpy"])
        if "cuda" in generators and torch.cuda.is_available():
            torch.cuda.set_rng_state(_to_tensor(generators["cuda"]))


def _to_bytes(state: torch.Tensor) -> bytes:
    return bytes(state.numpy().tobytes())


def _to_tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)
