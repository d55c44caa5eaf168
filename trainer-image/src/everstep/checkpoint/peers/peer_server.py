"""A writer's port for other nodes: it takes copies of their slots, and gives out the slots and copies that are here.

    open  key, node               the node manifest of that node's share of a checkpoint follows, `ok` bytes long;
                                  until the next `open` or the end of the connection the slot is not filled anew
    read  part, offset, length    those bytes of a part (by its number in the node manifest) follow
    put   key, locals, node, nodes, run, size
                                  a node manifest of `size` bytes and, after an `ok`, its parts follow

Threads, since bytes go from file to socket and from socket to memory in calls that hold no interpreter lock.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from everstep.checkpoint.errors import CheckpointError, Missing
from everstep.checkpoint.format.keys import Key
from everstep.checkpoint.format.manifest import Manifest
from everstep.checkpoint.peers import replica_slots
from everstep.checkpoint.peers.peer_link import MAX_MESSAGE, PeerLink, PeerLost
from everstep.checkpoint.peers.replica_slots import Copies
from everstep.checkpoint.slots.own_files import PORT
from everstep.checkpoint.slots.slot_files import is_own
from everstep.checkpoint.slots.slots import Claim, Slot, Slots

_log = logging.getLogger("everstep.checkpoint.peer")

MOST_CONNECTIONS = 512  # those that restore keep a few open for each rank


class PeerServer:
    """Listens from the first secret on.

    A writer's takes copies too. One that `only_reads` belongs to a process that restores: for as long as that takes it
    gives out the slots that are on its node, at a port of its own, and writes nothing.
    """

    def __init__(self, directory: Path, *, only_reads: bool = False, run: str | None = None) -> None:
        """`run`: what the store is called, where it is known; slots of another one are not given out."""
        self.copies = Copies(directory)
        self._directory = directory
        self._only_reads = only_reads
        self._run = run
        self._closed = False
        self._secret = ""
        self._count = 0
        self._listener: socket.socket | None = None
        self._places = threading.BoundedSemaphore(MOST_CONNECTIONS)

    def trust(self, secret: str, count: int) -> int | None:
        """Accept from now on peers that know this secret; with an empty one, none.

        Args:
            secret: The secret of the run.
            count: The number of copies to keep.

        Returns:
            The port, None where there never was a secret.
        """
        self._secret, self._count = secret, count
        if self._listener is None:
            if not secret:
                return None
            self._listener = self._listen()
            threading.Thread(target=self._serve, args=(self._listener,), daemon=True, name="peers").start()
        return int(self._listener.getsockname()[1])

    def _listen(self) -> socket.socket:
        """Listen at the port of the writer before us, where it is free: others were told that one."""
        if self._only_reads:
            return _bind_listener(0)
        file = self._directory / PORT
        with contextlib.suppress(OSError, ValueError):
            return _bind_listener(int(file.read_text()))
        listener = _bind_listener(0)
        file.write_text(str(listener.getsockname()[1]))
        return listener

    def close(self) -> None:
        """Stop listening. Connections that are open end with the other end, or with this process."""
        self._closed = True
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for somebody
            self._listener.close()
            self._secret = ""

    def _serve(self, listener: socket.socket) -> None:
        while True:
            try:
                peer, _ = listener.accept()
            except OSError as error:
                if self._closed:
                    return
                _log.warning("a peer was not accepted: %s", error)
                threading.Event().wait(0.1)  # out of descriptors, perhaps: others may end meanwhile
                continue
            if not self._places.acquire(blocking=False):
                peer.close()
                continue
            threading.Thread(target=self._attend, args=(peer,), daemon=True, name="peer").start()

    def _attend(self, peer: socket.socket) -> None:
        try:
            link = PeerLink.accept(peer, lambda: self._secret)
            if link is None:
                _log.warning("somebody who does not know the secret was sent away")
                return
            with contextlib.closing(link), ExitStack() as held:
                copies = None if self._only_reads else self.copies
                _Visit(self._directory, copies, self._count, self._run, link, held).serve()
        except (CheckpointError, OSError) as error:
            _log.info("a peer's connection ended: %s", error)
        except Exception:
            _log.exception("a peer's connection")
        finally:
            self._places.release()


class _Visit:
    """One connection."""

    def __init__(
        self, directory: Path, copies: Copies | None, count: int, run: str | None, link: PeerLink, held: ExitStack
    ) -> None:
        """`copies`: None where none are taken."""
        self._directory = directory
        self._copies = copies
        self._count = count
        self._run = run
        self._link = link
        self._held = held
        self._files: list[int] = []
        self._manifest: Manifest | None = None

    def serve(self) -> None:
        while (said := self._link.hear()) is not None:
            try:
                self._verb(said)
            except PeerLost:
                raise
            except (CheckpointError, OSError, KeyError, ValueError, IndexError) as error:
                # Whoever asked reads this wherever it stands; what it still sends would be read as messages.
                self._link.tell({"error": f"{error}" or repr(error)})
                if said.get("verb") == "put":
                    return

    def _verb(self, said: dict[str, Any]) -> None:
        match said["verb"]:
            case "open":
                self._open(Key.parse(said["key"]), int(said["node"]))
            case "read":
                self._read(int(said["part"]), int(said["offset"]), int(said["length"]))
            case "put" if self._copies is not None:
                locals_, node, nodes = (int(said[name]) for name in ("locals", "node", "nodes"))
                claim = Claim(Key.parse(said["key"]), locals_, node, nodes, str(said["run"]))
                data = self._link.get(min(int(said["size"]), MAX_MESSAGE))
                self._copies.take(self._link, claim, data, self._count)
                _log.info("%s of node %d is kept here", claim.key, claim.node)
                self._link.tell({"ok": None})
            case other:
                raise CheckpointError(f"no such verb: {other}")

    def _open(self, key: Key, node: int) -> None:
        self._held.close()
        self._files, self._manifest = [], None
        for slot, found in iterate_held_slots(self._directory, self._run):
            claim = slot.claimed()
            if found.key != key or claim is None or claim.node != node:
                continue
            try:
                self._held.enter_context(slot.reading())
            except Missing:  # removed just now
                continue
            if slot.manifest() != found:
                continue
            for local in range(len(found.parts)):
                descriptor = os.open(slot.part(local), os.O_RDONLY | os.O_CLOEXEC)
                self._held.callback(os.close, descriptor)
                self._files.append(descriptor)
            self._manifest = found
            data = slot.told()
            self._link.tell({"ok": len(data)})
            self._link.put(data)
            return
        raise CheckpointError(f"{key} of node {node} is not here")

    def _read(self, number: int, offset: int, length: int) -> None:
        if self._manifest is None:
            raise CheckpointError("open a checkpoint first")
        size = self._manifest.parts[number].size
        if number < 0 or offset < 0 or length < 0 or offset + length > size:
            raise CheckpointError(f"part {number} has no bytes {offset} to {offset + length}")
        self._link.tell({"ok": length})
        self._link.put_file(self._files[number], offset, length)


def iterate_held_slots(directory: Path, run: str | None = None) -> Iterator[tuple[Slot, Manifest]]:
    """Yield the whole slots of a node and the whole copies that it keeps.

    Args:
        directory: The slots' directory.
        run: The name that the store has now, empty when it has none, None when that is not known. Slots of another name
            are left of a store that was deleted, and count for nothing. So do those of another user.
    """
    if not is_own(directory):
        return
    for slots in (Slots(directory), replica_slots.open_peer_copies(directory)):
        for slot, manifest in slots.whole():
            claim = slot.claimed()
            if claim is not None and (run is None or not claim.run or claim.run == run):
                yield slot, manifest


def _bind_listener(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))
