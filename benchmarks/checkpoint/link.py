"""A network link of 10 Gbit/s in each direction between this process and others: two ends of a veth pair, of which one
is in a network namespace, each behind a token bucket (ip-netns(8), tc-tbf(8)). Only root may make one."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

RATE = "10gbit"
# Bytes that may pass at once: a tenth of a millisecond's worth is 125 kB, and a kernel of 250 ticks needs 5 MB.
_BUCKET = ("burst", "5mb", "latency", "50ms")


@dataclass(frozen=True)
class RemoteEnd:
    """The address of the other end, and the beginning of a command that runs there."""

    address: str
    command: tuple[str, ...]


@contextmanager
def shaped() -> Iterator[RemoteEnd]:
    """Make the link; it goes with the block.

    Raises:
        RuntimeError: This user may not, or iproute2 is not installed.
    """
    number = os.getpid() % 200
    name, ours, theirs = f"everstep-{number}", f"evs{number}a", f"evs{number}b"
    net = f"10.213.{number}"
    inside = ("ip", "netns", "exec", name)
    try:
        _run("ip", "netns", "add", name)
        _run("ip", "link", "add", ours, "type", "veth", "peer", "name", theirs, "netns", name)
        _run("ip", "address", "add", f"{net}.1/24", "dev", ours)
        _run("ip", "link", "set", ours, "up")
        _run(*inside, "ip", "address", "add", f"{net}.2/24", "dev", theirs)
        _run(*inside, "ip", "link", "set", theirs, "up")
        _run("tc", "qdisc", "add", "dev", ours, "root", "tbf", "rate", RATE, *_BUCKET)
        _run(*inside, "tc", "qdisc", "add", "dev", theirs, "root", "tbf", "rate", RATE, *_BUCKET)
        yield RemoteEnd(f"{net}.2", inside)
    finally:
        for command in (("ip", "link", "delete", ours), ("ip", "netns", "delete", name)):
            with suppress(RuntimeError):
                _run(*command)


def _run(*command: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise RuntimeError(f"{command[0]} is not installed: install iproute2") from error
    except subprocess.CalledProcessError as error:
        raise RuntimeError(f"{' '.join(command)}: {error.stderr.strip()}") from error
