"""Ranks that meet at a barrier and report by UDP, and the ear on this machine that hears them.

The same program runs under everstep, as bare pods and in an Indexed Job: only where it learns its rank differs.
"""

from __future__ import annotations

import contextlib
import socket
import time
from dataclasses import dataclass, field

RANK = """
import os, select, signal, socket, sys, time
signal.signal(signal.SIGTERM, lambda *_: os._exit(143))  # process 1 of a bare pod would ignore it
env = os.environ
rank = int(env.get('RANK', env.get('JOB_COMPLETION_INDEX', 0))); world = int(env.get('WORLD_SIZE', env.get('WORLD', 1)))
master, port = env['MASTER_ADDR'], int(env.get('MASTER_PORT', 29500))
ear = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); ear.connect((env['EAR'], int(env['EAR_PORT'])))
tell = lambda what: ear.send(f"{env['TAG']} {rank} {what}".encode())
rejoin = env.get('REJOIN') == '1'
def meet():
    if rank == 0:
        door = socket.socket(); door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        door.bind(('', port)); door.listen(world)
        peers = []
        while len(peers) < world - 1:
            peer, _ = door.accept(); peers.append(peer)
        for peer in peers: peer.sendall(b'g')
        door.close()
        return peers
    while True:
        try:
            peer = socket.create_connection((master, port), timeout=1); peer.settimeout(None)
            if peer.recv(1) == b'g': return [peer]
        except OSError: pass
        time.sleep(0.01)
tell('started')
while True:
    peers = meet()
    tell('passed')
    while True:
        ready, _, _ = select.select([ear, *peers], [], [])
        if ear in ready:
            word = ear.recv(64)
            if word == b'exit': os._exit(1)
            if word == b'done': os._exit(0)
        elif not rejoin: os._exit(1)
        else:
            for peer in peers: peer.close()
            break
"""


@dataclass
class Heard:
    """The times (monotonic seconds) of `started` and `passed` that the ranks of one tag have told, by rank."""

    started: dict[int, list[float]] = field(default_factory=dict)
    passed: dict[int, list[float]] = field(default_factory=dict)
    address: dict[int, tuple[str, int]] = field(default_factory=dict)


class Ear:
    """A UDP socket on the address that pods can reach."""

    def __init__(self, address: str) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        self._socket.bind((address, 0))
        self.address, self.port = self._socket.getsockname()
        self._heard: dict[str, Heard] = {}

    def env(self, tag: str, **more: str) -> list[dict[str, str]]:
        """Return the environment by which a rank finds this ear."""
        pairs = {"EAR": self.address, "EAR_PORT": str(self.port), "TAG": tag} | more
        return [{"name": name, "value": value} for name, value in pairs.items()]

    def listen(self, tag: str, world: int, barriers: int = 1, timeout: float = 120) -> float:
        """Wait until every rank has passed that many barriers; the monotonic time of the last to do so."""
        deadline = time.monotonic() + timeout
        heard = self.heard(tag)
        while sum(len(times) >= barriers for times in heard.passed.values()) < world:
            self._socket.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                data, address = self._socket.recvfrom(256)
            except TimeoutError:
                raise AssertionError(f"{tag}: not all of {world} ranks passed barrier {barriers}: {heard}") from None
            now = time.monotonic()
            name, rank, what = data.decode().split()
            of = self.heard(name)
            of.address[int(rank)] = address
            (of.passed if what == "passed" else of.started).setdefault(int(rank), []).append(now)
        return max(times[barriers - 1] for times in heard.passed.values())

    def heard(self, tag: str) -> Heard:
        return self._heard.setdefault(tag, Heard())

    def say(self, tag: str, rank: int, word: str) -> float:
        """Tell a rank to `exit` with 1 or that it is `done`; the time of saying so."""
        self._socket.sendto(word.encode(), self.heard(tag).address[rank])
        return time.monotonic()

    def dismiss(self, tag: str) -> None:
        for rank in self.heard(tag).address:
            with contextlib.suppress(OSError):
                self.say(tag, rank, "done")
