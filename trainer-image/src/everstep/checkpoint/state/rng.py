"""The random generators of a rank: Python's, NumPy's, torch's for the processor and for the GPUs."""

from __future__ import annotations

import random
import sys
from array import array
from collections.abc import Mapping
from typing import Any

import torch

from everstep.checkpoint.state.kinds import PerRank

GENERATORS = "rng"  # the name of the generators among the objects of a session
_CUDA = "cuda"  # the current device's generator; another's is cuda:<number>


def add_generators(objects: Mapping[str, object]) -> dict[str, object]:
    """Return the objects of a session with the generators of this rank.

    Raises:
        ValueError: An object has their name.
    """
    if GENERATORS in objects:
        raise ValueError(f"an object cannot be called {GENERATORS!r}: the random generators are saved as that")
    return {**objects, GENERATORS: PerRank(Rng())}


class Rng:
    """The state of this process's generators; wrap it in PerRank, since each rank draws its own numbers.

    Of all GPUs that the process sees, by their numbers: a generator is a few bytes in main memory, and asking for those
    of a GPU that is not used starts nothing on it. The current one's comes back to what is the current one then.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return what is small of the states, and the rest of them all in one piece: one tensor for each rank."""
        version, words, gauss = random.getstate()
        pieces = {"python": array("I", words).tobytes(), "torch": _to_bytes(torch.get_rng_state())}
        small: dict[str, Any] = {"python": [version, gauss]}
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            state = numpy.random.get_state(legacy=False)
            if "key" in state["state"]:
                key = state["state"]["key"]
                pieces["numpy"] = key.tobytes()
                state = {**state, "state": {**state["state"], "key": key.dtype.str}}
            small["numpy"] = state
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            current = torch.cuda.current_device()
            pieces[_CUDA] = _to_bytes(torch.cuda.get_rng_state(current))
            for device in range(torch.cuda.device_count()):
                if device != current:
                    pieces[f"{_CUDA}:{device}"] = _to_bytes(torch.cuda.get_rng_state(device))
        small["pieces"] = [[name, len(piece)] for name, piece in pieces.items()]
        return {"generators": [small], "states": b"".join(pieces.values())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        (small,) = state["generators"]
        if "states" not in state:  # of an earlier version
            self._load_all(small)
            return
        at, pieces = 0, {}
        for name, length in small["pieces"]:
            pieces[name] = state["states"][at : at + length]
            at += length
        version, gauss = small["python"]
        loaded: dict[str, Any] = {"python": (version, tuple(array("I", pieces["python"])), gauss)}
        loaded |= {name: piece for name, piece in pieces.items() if name.partition(":")[0] in ("torch", _CUDA)}
        if "numpy" in small:
            import numpy

            own = small["numpy"]
            if "numpy" in pieces:
                key = numpy.frombuffer(pieces["numpy"], own["state"]["key"])
                own = {**own, "state": {**own["state"], "key": key}}
            loaded["numpy"] = own
        self._load_all(loaded)

    def _load_all(self, generators: dict[str, Any]) -> None:
        random.setstate(generators["python"])
        torch.set_rng_state(_to_tensor(generators["torch"]))
        if "numpy" in generators:
            import numpy

            numpy.random.set_state(generators["numpy"])
        if _CUDA in generators and torch.cuda.is_available():
            for device in range(torch.cuda.device_count()):  # fewer or more than were saved
                if f"{_CUDA}:{device}" in generators:
                    torch.cuda.set_rng_state(_to_tensor(generators[f"{_CUDA}:{device}"]), device)
            torch.cuda.set_rng_state(_to_tensor(generators[_CUDA]))


def _to_bytes(state: torch.Tensor) -> bytes:
    return bytes(state.numpy().tobytes())


def _to_tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)
