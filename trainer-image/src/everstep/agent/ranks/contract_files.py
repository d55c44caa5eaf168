"""Puts the contract's files into their folder, which may be in a volume of the user's."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Callable

from everstep.agent.system.faults import name_file_in_errors

# Why they may have no room: the user's volume is read-only, or has something else in their place.
_USERS_VOLUME = frozenset(
    (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ELOOP)
)


def make_contract_folders(folders: Iterable[str]) -> None:
    """Make folders, except where a user's volume takes none.

    Args:
        folders: Their paths, parents first.

    Raises:
        OSError: The pod's own disk fails, or is full.
    """
    for folder in folders:
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            if error.errno not in _USERS_VOLUME:
                raise


def write_contract_files(files: Mapping[str, bytes], own: Path | None, log: Callable[[str], None]) -> None:
    """Write files, except where a user's volume takes none.

    Other pods, also of other jobs, may write theirs under the same paths of a volume that they share: ranks would read
    what was written last. There each pod reads its own files by links that are the same in all of them.

    Args:
        files: Their content by path.
        own: A folder that this pod alone sees, and under the same path as any other pod, for the files behind the
            links; None: nobody else sees the paths.
        log: Takes a line for the log.

    Raises:
        OSError: The pod's own disk fails, or is full.
    """
    for path, data in files.items():
        try:
            with name_file_in_errors(Path(path)):
                if own is not None and _link_file(Path(path), data, own):
                    continue
                Path(path).write_bytes(data)
        except OSError as error:
            if error.errno not in _USERS_VOLUME:
                raise  # a full disk leaves half a file, which is worse than none
            log(f"everstep: {path} is not written ({error.strerror}): use SM_HPS and SM_RESOURCE_CONFIG")
        else:
            if own is not None:
                log(
                    f"everstep: the volume of {path} takes no links: if other pods write there too, read SM_HPS and "
                    "SM_RESOURCE_CONFIG in its place"
                )


def _link_file(path: Path, data: bytes, own: Path) -> bool:
    """Write a file into `own`, and let the path be a link to it. Return False if the volume takes no links."""
    own.mkdir(parents=True, exist_ok=True)
    target = own / path.name
    target.write_bytes(data)
    try:
        if path.is_symlink() and path.readlink() == target:
            return True
        spare = path.with_name(f".{path.name}-{os.urandom(8).hex()}")
        spare.symlink_to(target)
        try:
            spare.replace(path)
        except OSError:
            spare.unlink()
            raise
    except OSError:  # of some kind or other: whether it takes files at all, a write will tell
        return False
    return True
