"""Make paths absolute, for processes that work in another folder than the one that was given them."""

from __future__ import annotations

import os
from pathlib import Path

from everstep.checkpoint.errors import CheckpointError


def make_absolute(path: str | os.PathLike[str], what: str) -> Path:
    """Return the absolute path; links in it stay.

    Args:
        path: As a user gave it; a `~` at its start is a home, as in a shell.
        what: It is, for the message.

    Raises:
        CheckpointError: It is relative to a working directory that is not there any more, or to a home that nobody
            knows.
    """
    try:
        return Path(path).expanduser().absolute()
    except RuntimeError as error:
        raise CheckpointError(f"{what} {os.fspath(path)}: {error}: give an absolute path, or set HOME") from error
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{what} {os.fspath(path)} is relative to the working directory of process {os.getpid()}, which was "
            "deleted: give an absolute path, or start the process in a folder that stays"
        ) from error
