"""Every call of a process that changes the file system below one folder: counted, and a place to die or to freeze.

The whole process is watched, not a seam of ours: what goes through `os` and `open` by whatever module. Two kinds are no
points of their own: a small file's bytes reach it when it is closed, which is after its creation and before the next
call; and a socket appears after its old name was removed and before its mode is set.
"""

from __future__ import annotations

import builtins
import io
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.checkpoint.crash import Point

_BY_PATH = ("chmod", "link", "mkdir", "remove", "rename", "replace", "rmdir", "symlink", "truncate", "unlink", "utime")
_BY_DESCRIPTOR = ("fdatasync", "fsync", "ftruncate", "posix_fallocate", "write")


class Calls:
    """Patches this process for good. At `point` it sends itself `number`."""

    def __init__(self, folder: Path, point: Point | None = None, number: int = signal.SIGKILL) -> None:
        self.seen: list[tuple[str, str]] = []  # the call, and the path below the folder
        self._folder = f"{folder}{os.sep}"
        self._point = point
        self._number = number
        self._lock = threading.RLock()
        for name in _BY_PATH:
            self._patch(os, name, lambda arguments, options: self._ours(*arguments, *options.values()))
        for name in _BY_DESCRIPTOR:
            self._patch(os, name, lambda arguments, options: self._ours(arguments[0]))
        self._patch(os, "open", self._creates)
        for module in (io, builtins):
            self._patch(module, "open", self._opens_for_writing)

    def _patch(self, module: Any, name: str, changes: Callable[[Any, Any], str]) -> None:
        real = getattr(module, name)

        def watched(*arguments: Any, **options: Any) -> Any:
            path = changes(arguments, options)
            if not path:
                return real(*arguments, **options)
            with self._lock:  # one after the other, so that before and after a call is a moment of the whole process
                here = self._point is not None and self._point.number == len(self.seen)
                self.seen.append((name, path))
                if here and self._point and not self._point.after:
                    os.kill(os.getpid(), self._number)
                try:
                    return real(*arguments, **options)
                finally:
                    if here and self._point and self._point.after:
                        os.kill(os.getpid(), self._number)

        setattr(module, name, watched)

    def _creates(self, arguments: tuple[Any, ...], options: dict[str, Any]) -> str:
        return self._ours(arguments[0]) if arguments[1] & os.O_CREAT else ""

    def _opens_for_writing(self, arguments: tuple[Any, ...], options: dict[str, Any]) -> str:
        mode = arguments[1] if len(arguments) > 1 else options.get("mode", "r")
        return self._ours(arguments[0]) if set(mode) & set("wax+") else ""

    def _ours(self, *where: Any) -> str:
        """The first of these that is a path below the folder, or a file that is open there; "" when none is."""
        for each in where:
            if isinstance(each, int) and not isinstance(each, bool):
                try:
                    each = Path(f"/proc/self/fd/{each}").readlink()
                except OSError:
                    continue
            if isinstance(each, (str, Path)) and os.fspath(each).startswith(self._folder):
                return os.fspath(each).removeprefix(self._folder)
        return ""
