"""The sessions that save in one process: of two with one store and one memory, the later one goes on.

A script that begins anew within its process, without close(), makes such a second one. The node's writer serves one run
at a time, so that the earlier session could save nothing any more, and would say so at its end only.
"""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Protocol

_AFTER_LATER = (
    "is called after another session of this process has begun to save in {store}, which only one can do at a time: go "
    "on with that one, close() the earlier one before a second one is made, or give each a store of its own"
)


class SavingSession(Protocol):
    """A session; `ended` says why nothing may be called any more, empty while it goes on."""

    ended: str


_sessions: weakref.WeakValueDictionary[Path, SavingSession] = weakref.WeakValueDictionary()


def replace_earlier_session(directory: Path, session: SavingSession, store: str) -> None:
    """Note that a session of this process saves from here on, and end an earlier one that had the same slots.

    Args:
        directory: The folder of the slots.
        session: The session that has just claimed them.
        store: The URL of its store, for the message.
    """
    earlier = _sessions.get(directory)
    if earlier is not None and earlier is not session and not earlier.ended:
        earlier.ended = _AFTER_LATER.format(store=store)
    _sessions[directory] = session


def is_only_session(session: SavingSession) -> bool:
    """Tell whether no other session of this process saves, in whatever store."""
    return all(other is session or other.ended for other in _sessions.values())
