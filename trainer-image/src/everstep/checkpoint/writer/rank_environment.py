"""Tell a node's writer where a rank finds modules, and its environment: the writer works in another folder."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from pathlib import Path

# Variables that name a file or a folder, as AWS_SHARED_CREDENTIALS_FILE or GOOGLE_APPLICATION_CREDENTIALS.
_NAMES_PATH = re.compile(r"(.*_)?(FILE|PATH|DIR|BUNDLE|CREDENTIALS|HOME|NETRC)|.*CONFIG", re.ASCII)


def list_places() -> list[str]:
    """Return the places in which this process finds modules, each an absolute path and an argument of its own.

    A script may put anything into its path. Python passes over what is no text, as a `pathlib.Path`, and so does this.
    """
    places: dict[str, None] = {}
    for place in sys.path:
        # What cannot be a file's name, or is relative to a working directory that was deleted, has no modules.
        with contextlib.suppress(ValueError, OSError):
            if isinstance(place, str) and b"\0" not in os.fsencode(place):
                places[str(Path(place).absolute())] = None
    return list(places)


def list_variables(limit: int) -> dict[str, str]:
    """Return this process's environment as a writer that runs already is told it; nothing where it is too large.

    What a store is opened with, as credentials that were renewed, is found there.

    Args:
        limit: How many bytes it may have.
    """
    found = find_environment()
    is_small = sum(len(os.fsencode(name)) + len(os.fsencode(value)) for name, value in found.items()) < limit
    return found if is_small else {}


def find_environment() -> dict[str, str]:
    """Return this process's environment for one with another working directory.

    Relative paths of files and folders that are there, as those of credentials, are made absolute. Relative entries of
    PYTHONPATH are left out: Python has made them absolute at its start, in `sys.path`.
    """
    places = [place for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if Path(place).is_absolute()]
    return {
        **{name: _make_absolute(name, value) for name, value in os.environ.items()},
        **({"PYTHONPATH": os.pathsep.join(places)} if "PYTHONPATH" in os.environ else {}),
    }


def _make_absolute(name: str, value: str) -> str:
    if not value or not _NAMES_PATH.fullmatch(name):
        return value
    with contextlib.suppress(OSError):  # no path, or a working directory that was deleted
        if os.path.lexists(value):
            return str(Path(value).absolute())
    return value
