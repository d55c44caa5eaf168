"""Values of parametrized tests that only `make test-chaos` tries.

Each takes seconds or a minute, and adds little to the evidence of the others.
"""

from __future__ import annotations

from typing import Any

import pytest


def only_in_long_sweeps(*values: Any) -> list[Any]:
    """Return the values, each a tuple where there are several parameters, marked for `make test-chaos`."""
    return [pytest.param(*(each if isinstance(each, tuple) else (each,)), marks=pytest.mark.chaos) for each in values]
