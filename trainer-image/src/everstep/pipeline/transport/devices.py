"""Devices by their numbers."""

from __future__ import annotations

import torch


def with_index(device: torch.device | str) -> torch.device:
    """Return the device by its number: "cuda" alone is whichever device is current, which another call may change."""
    found = torch.device(device)
    if found.type == "cuda" and found.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return found
