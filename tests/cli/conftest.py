"""The command in an empty folder."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.cli.command import Done, as_process, in_process

Everstep = Callable[..., Done]


@pytest.fixture
def everstep(tmp_path: Path) -> Everstep:
    return partial(in_process, tmp_path)


@pytest.fixture
def everstep_process(tmp_path: Path) -> Everstep:
    return partial(as_process, tmp_path)
