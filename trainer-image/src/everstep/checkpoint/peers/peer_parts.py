"""Parts of a checkpoint in the memory of other nodes, read as if from a store."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence

from everstep.checkpoint.format.keys import Key
from everstep.checkpoint.format.manifest import Manifest, decode_manifest
from everstep.checkpoint.peers.peer_link import Address, PeerLink, PeerLost


class Share:
    """An open connection to a node that holds one node's share of a checkpoint; its slot stays as it is meanwhile."""

    def __init__(
        self,
        address: Address,
        secret: str,
        key: Key,
        node: int,
        decode: Callable[[bytes, str], Manifest] = decode_manifest,
    ) -> None:
        """PeerLost when the share is not there."""
        self._link = PeerLink.connect(address, secret)
        try:
            size = int(self._link.call("open", key=str(key), node=node))
            self.manifest = decode(self._link.get(size), f"the node manifest at {self._link.name}")
        except BaseException:
            self._link.close()
            raise
        self._numbers = {part.name: i for i, part in enumerate(self.manifest.parts)}

    def read_into(self, name: str, offset: int, into: memoryview) -> None:
        """Read as Store.read_into does. Raises PeerLost."""
        if name not in self._numbers:
            raise PeerLost(f"has no {name}", self._link.name)
        self._link.call("read", part=self._numbers[name], offset=offset, length=len(into))
        self._link.fill(into)

    def close(self) -> None:
        self._link.close()


class PeerParts:
    """The shares of one checkpoint that other nodes hold; every thread has connections of its own."""

    def __init__(self, key: Key, places: Sequence[Sequence[Address]], names: Mapping[str, int], secret: str) -> None:
        """`places`: for each share, who holds it; `names` of parts that are in one of them, and the share's number."""
        self._key = key
        self._places = places
        self._names = names
        self._secret = secret
        self._own = threading.local()
        self._all: list[Share] = []
        self._lock = threading.Lock()
        self._decoded = functools.lru_cache(maxsize=None)(decode_manifest)

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def read_into(self, name: str, offset: int, into: memoryview) -> None:
        """Read as Store.read_into does, from the first node that gives the bytes.

        Raises:
            PeerLost: No node does.
        """
        number = self._names[name]
        shares: dict[int, Share] = self._own.__dict__.setdefault("shares", {})
        try:
            if number not in shares:
                shares[number] = self._connect(number)
            shares[number].read_into(name, offset, into)
        except PeerLost:
            if number not in shares:
                raise
            # The connection is lost: once more, with whoever is there now.
            shares.pop(number).close()
            shares[number] = self._connect(number)
            shares[number].read_into(name, offset, into)

    def manifest(self, number: int) -> Manifest:
        """Return the node manifest of a share. PeerLost, Damaged."""
        found = self._connect(number)
        found.close()
        return found.manifest

    def close(self) -> None:
        """Release all slots."""
        for share in self._all:
            share.close()

    def _decode(self, data: bytes, name: str) -> Manifest:
        # Every thread gets the same again; one at a time, so that the others find it.
        with self._lock:
            return self._decoded(data, name)

    def _connect(self, number: int) -> Share:
        failures = []
        # No place at all: only this node's memory was to serve it, and its writer has removed that since.
        for address in self._places[number] if number < len(self._places) else ():
            try:
                found = Share(address, self._secret, self._key, number, self._decode)
            except PeerLost as error:
                failures.append(str(error))
            else:
                self._all.append(found)
                return found
        raise PeerLost("; ".join(failures) or "no other node holds it", f"{self._key} of node {number}")
