"""Checksums of chunks, headers and manifests: fast enough to vanish beside a disk, from libraries in C."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

DEFAULT = "xxh3_64"

Buffer = bytes | bytearray | memoryview

# google_crc32c takes bytes only; pieces that fit a core's cache make the copy nearly free.
_PIECE = 128 * 1024


class RunningChecksum(Protocol):
    """The checksum of bytes that come in pieces, one after the other."""

    def update(self, data: Buffer, /) -> None: ...

    def hexdigest(self) -> str: ...


class _RunningCrc32c:
    def __init__(self) -> None:
        self._crc = 0

    def update(self, data: Buffer, /) -> None:
        import google_crc32c

        for piece in _iterate_pieces(data):
            self._crc = google_crc32c.extend(self._crc, piece)

    def hexdigest(self) -> str:
        return f"{self._crc:08x}"


def _running_xxh3_64() -> RunningChecksum:
    import xxhash

    return xxhash.xxh3_64()


def _xxh3_64(data: Buffer) -> str:
    import xxhash

    return xxhash.xxh3_64_hexdigest(data)


def _compute_crc32c(data: Buffer) -> str:
    running = _RunningCrc32c()
    running.update(data)
    return running.hexdigest()


def _iterate_pieces(data: Buffer) -> Iterator[bytes]:
    if isinstance(data, bytes):
        yield data
        return
    view = memoryview(data).cast("B")
    for start in range(0, len(view), _PIECE):
        yield bytes(view[start : start + _PIECE])


_ALGORITHMS: dict[str, tuple[Callable[[Buffer], str], int]] = {
    "xxh3_64": (_xxh3_64, 16),
    "crc32c": (_compute_crc32c, 8),
}

_RUNNING: dict[str, Callable[[], RunningChecksum]] = {"xxh3_64": _running_xxh3_64, "crc32c": _RunningCrc32c}

ALGORITHMS = tuple(_ALGORITHMS)


def compute_checksum(algorithm: str, data: Buffer) -> str:
    """Return the checksum of `data` (contiguous) in lower-case hex.

    Raises:
        KeyError: The algorithm is not in ALGORITHMS.
    """
    return _ALGORITHMS[algorithm][0](data)


def begin_checksum(algorithm: str) -> RunningChecksum:
    """Return the checksum of nothing yet.

    After update() with all pieces its hexdigest() is what compute_checksum() gives for the whole.

    Raises:
        KeyError: There is no such algorithm in ALGORITHMS.
    """
    return _RUNNING[algorithm]()


def get_checksum_width(algorithm: str) -> int:
    """Return the number of hex digits of a checksum; KeyError for an algorithm that is not in ALGORITHMS."""
    return _ALGORITHMS[algorithm][1]
