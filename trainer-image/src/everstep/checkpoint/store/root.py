"""The folder of a store, told apart from whatever else comes to lie at its path.

A file system that was unmounted leaves its mount point there: what is written into that is lost from sight when the
file system comes back.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from everstep.checkpoint.errors import StoreError
from everstep.checkpoint.format.keys import RUN


class RootFolder:
    """A folder that was seen, and has to be the same one from then on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._identity: tuple[int, int] | None = None
        self._run: bytes | None = None

    @property
    def is_pinned(self) -> bool:
        """Return whether the folder was seen, and must not be made anew."""
        return self._identity is not None

    def pin(self, run: bytes | None = None) -> None:
        """Remember the folder that is there now as the store's; `run`: the name that it gives itself, once known."""
        if self._identity is None:
            self._identity = self._identify()
        self._run = run or self._run

    def check(self) -> None:
        """See that the folder is the one that was pinned, if one was.

        Raises:
            StoreError: It is gone, or another one is at its path. It may come back.
        """
        if self._identity is None or (found := self._identify()) == self._identity:
            return
        if found is not None and self._run is not None and self._read_run() == self._run:
            self._identity = found  # mounted again, under another number
            return
        raise StoreError(
            "its folder is gone, or another one lies at its path: its file system was unmounted, or the store was "
            "deleted. Nothing is written there; saves go on when it is back",
            str(self._path),
            may_pass=True,
        )

    def _identify(self) -> tuple[int, int] | None:
        try:
            status = self._path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        return status.st_dev, status.st_ino

    def _read_run(self) -> bytes | None:
        with suppress(OSError):
            return (self._path / RUN).read_bytes()
        return None
