"""The places of a session: its store, and the directory of its node's slots. Nothing is written in them here."""

from __future__ import annotations

from pathlib import Path

from everstep.checkpoint.errors import CheckpointError
from everstep.checkpoint.host.paths import make_absolute
from everstep.checkpoint.ranks.topology import Topology, check_shares_memory, find_place
from everstep.checkpoint.session.options import SessionArguments
from everstep.checkpoint.slots.own_files import check_holds_slots_only
from everstep.checkpoint.slots.slots import default_directory, default_memory
from everstep.checkpoint.store.base import Store, open_store
from everstep.checkpoint.store.overlap import check_is_place, check_is_text, holds_store
from everstep.coordination.group import RankGroup


def open_places(asked: SessionArguments, topology: Topology, group: RankGroup) -> tuple[Store, Path]:
    """Open the store, and find the directory of this node's slots. Collective.

    Args:
        asked: The arguments of the session.
        topology: The place of this rank in the run.
        group: All ranks.

    Returns:
        The store and the directory.

    Raises:
        CheckpointError: On all ranks: one of them cannot open the store, or has no memory, or another one than the
            other ranks of its node.
    """

    def open_both() -> tuple[Store, Path, Path | None]:
        named = asked.memory.directory  # the writer works in another folder
        own = None if named is None else make_absolute(named, "MemoryOptions.directory")
        if own is not None:
            check_holds_slots_only(own)
        opened = open_store(asked.store, **dict(asked.storage.options or {}))
        check_is_text(opened.url, "the store")
        check_is_text(str(own or default_memory()), "the memory for checkpoints")
        check_is_place(opened)
        return opened, default_memory(), own

    store, shared, own = group.run_on_all_ranks(open_both)  # else others wait for one that cannot
    place = find_place(topology, shared, group)
    directory = own if own is not None else default_directory(store.url, place)
    check_shares_memory(topology, directory, group)
    group.run_on_all_ranks(lambda: _check_apart(store, directory))
    return store, directory


def _check_apart(store: Store, directory: Path) -> None:
    """See that the store is not in the memory, which is removed when its runs have ended.

    Raises:
        CheckpointError: It is a folder in it, or that folder itself.
    """
    if holds_store(directory, store):
        raise CheckpointError(
            f"the store {store.url} is in {directory}, the memory for checkpoints, which is removed when its runs have "
            "ended: name a directory of its own in MemoryOptions(directory=…)"
        )
