"""Forecast a save for the script that asks for it: whether it begins, and when it will be in the store."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Forecast:
    """The forecast of a save.

    `saves`: whether a save was begun. `seconds` until it is (or would be) in the store, None when nothing was measured
    yet.
    """

    saves: bool
    seconds: float | None
