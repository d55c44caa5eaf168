"""A module whose state has a list of tensors."""

from __future__ import annotations

from typing import Any

from torch import nn


class Listing(nn.Module):  # type: ignore[misc]
    """Says a list of tensors in its state, as metrics that keep all that they were given do."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def _save_to_state_dict(self, state: Any, prefix: str, keep_vars: bool) -> None:
        state[f"{prefix}seen"] = list(self.seen)

    def _load_from_state_dict(self, state: Any, prefix: str, *more: Any) -> None:
        self.seen = list(state.pop(f"{prefix}seen"))
