"""See that prefixes of names which an export or an import is to change are there."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping

from everstep.checkpoint.catalog.selection import Rename

_log = logging.getLogger("everstep.checkpoint")


def warn_of_unused_renames(rename: Rename | None, names: Collection[str]) -> None:
    """Warn of prefixes with which no name begins: an export takes names within its object, an import full names.

    Args:
        rename: As a user gives it; of a function nobody knows what it looks for.
        names: What there is to rename.
    """
    if rename is None or not isinstance(rename, Mapping):
        return
    unused = [old for old in rename if not any(name.startswith(old) for name in names)]
    if unused:
        example = min(names, default="")
        _log.warning(
            "rename: no name begins with %s, so that nothing is renamed by it; a name here is %s",
            ", ".join(unused),
            example,
        )
