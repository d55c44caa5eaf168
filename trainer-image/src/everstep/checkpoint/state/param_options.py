"""Options of an optimizer's groups as values of a checkpoint, and back."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch

from everstep.checkpoint.errors import CheckpointError
from everstep.checkpoint.state.kinds import is_tensor
from everstep.checkpoint.values import pack

_NO_OPTION = ("params", "param_names")


def pack_options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _option(key, value) for key, value in group.items() if key not in _NO_OPTION}


def _option(key: str, value: Any) -> Any:
    if not is_tensor(value):
        return value
    if value.numel() != 1:
        raise CheckpointError(f"the option {key} of an optimizer is a tensor of {value.numel()} elements")
    return ("tensor", value.dtype, value.item())


def take_option(live: Any, saved: Any) -> Any:
    if not (isinstance(saved, tuple) and len(saved) == 3 and saved[0] == "tensor"):
        return saved
    if is_tensor(live) and live.dtype == saved[1]:
        # In place, because a captured graph reads it there.
        return live.fill_(saved[2])
    return torch.tensor(saved[2], dtype=saved[1])


def digest_options(options: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(pack(options), sort_keys=True).encode()).hexdigest()[:16]
