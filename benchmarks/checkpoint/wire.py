"""The other node of `restore-peer`, as a process: a writer's port, and a plain sender of as many bytes.

It is at the other end of a link of 10 Gbit/s (link.py).

`python -m benchmarks.checkpoint.wire MEMORY FILE SIZE`; the secret comes on standard input, and its end
is the end.
"""

from __future__ import annotations

import mmap
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.checkpoint.link import RemoteEnd
from everstep.checkpoint.peers.peer_link import Address
from everstep.checkpoint.peers.peer_server import PeerServer


@dataclass(frozen=True)
class Wire:
    """The addresses of the writer's port and of the plain sender's."""

    writer: Address
    plain: Address


@contextmanager
def wire(memory: Path, file: Path, size: int, secret: str, link: RemoteEnd) -> Iterator[Wire]:
    """`memory`: the slots that are given out; `file`: shared memory of which the plain sender sends `size` bytes."""
    process = subprocess.Popen(
        [*link.command, sys.executable, "-m", "benchmarks.checkpoint.wire", str(memory), str(file), str(size)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(f"{secret}\n")
        process.stdin.flush()
        writer, plain = map(int, process.stdout.readline().split())
        yield Wire((link.address, writer), (link.address, plain))
    finally:
        process.stdin.close()
        process.wait()


def main() -> None:
    memory, file, size = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    secret = sys.stdin.readline().strip()
    port = PeerServer(memory).trust(secret, 1)
    listener = socket.create_server(("", 0))
    threading.Thread(target=_send, args=(listener, file, size), daemon=True).start()
    print(port, listener.getsockname()[1], flush=True)
    sys.stdin.read()
    os._exit(0)


def _send(listener: socket.socket, file: Path, size: int) -> None:
    with file.open("rb") as opened:
        pages = mmap.mmap(opened.fileno(), size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=mmap.PROT_READ)
    while True:
        peer, _ = listener.accept()
        with peer, memoryview(pages) as data:
            peer.sendall(data)


if __name__ == "__main__":
    main()
