"""Reads a busy stream of events in volleys.

While a thousand pods start, their events come one by one, some milliseconds apart. To wake for each of them, and to
decrypt it alone, takes as much of the processor as all that is then done with it. So from a stream that is busy
nothing is read for a moment, after which several events are there. A few events, as of a small job, are read as they
come.
"""

from __future__ import annotations

import asyncio
import asyncio.trsock
import contextlib
import socket
import time
from collections.abc import Callable

import aiohttp

GATHER_SECONDS, GATHER_BYTES = 0.05, 256 << 10
# A stream is busy once it has told more than so many events, of which so many a second are forgotten.
BURST_EVENTS, USUAL_EVENTS_PER_SECOND = 20.0, 50.0
_MOST_EVENTS = 2 * BURST_EVENTS  # it stops to be busy within half a second, however many there were


class StreamPacer:
    """Tells whether a stream is busy.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._level, self._noted_at = 0.0, clock()

    def note(self, events: int) -> bool:
        """Note that so many events were read at a time; return whether the next ones are worth waiting for."""
        now = self._clock()
        left = max(0.0, self._level - USUAL_EVENTS_PER_SECOND * (now - self._noted_at))
        self._level, self._noted_at = min(_MOST_EVENTS, left + events), now
        return self._level > BURST_EVENTS


async def gather_events(response: aiohttp.ClientResponse) -> None:
    """Wait a moment for more of a response, and let the kernel gather it meanwhile.

    Args:
        response: A response that tells events; one that has ended is left alone.
    """
    connection = response.connection
    if connection is None or (transport := connection.transport) is None:
        return
    # To pause the transport would not do: that of an encrypted connection goes on to wake for each packet.
    if (peer := transport.get_extra_info("socket")) is None:
        return
    _set_low_water(peer, GATHER_BYTES)
    try:
        await asyncio.sleep(GATHER_SECONDS)
    finally:
        _set_low_water(peer, 1)


def _set_low_water(peer: asyncio.trsock.TransportSocket, num_bytes: int) -> None:
    """Let a socket wake nobody before so many bytes are there, or its end is: see SO_RCVLOWAT in socket(7)."""
    with contextlib.suppress(OSError):  # it is closed, or its kernel cannot: then each packet wakes
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_bytes)
