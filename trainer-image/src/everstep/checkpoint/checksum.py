"""Checksums of chunks, headers and manifests: fast enough to vanish beside a disk, from libraries in C."""

from __future__ import annotations

from collections.abc import Callable, Iterator

DEFAULT = "xxh3_64"

Buffer = bytes | bytearray | memoryview

# google_crc32c takes bytes only; pieces that fit a core's cache make the copy nearly free.
_PIECE = 128 * 1024


def _xxh3_64(data: Buffer) -> str:
    import xxhash

    return xxhash.xxh3_64_hexdigest(data)


def _crc32c(data: Buffer) -> str:
    import google_crc32c

    crc = 0
    for piece in _pieces(data):
        crc = google_crc32c.extend(crc, piece)
    return f"{crc:08x}"


def _pieces(data: Buffer) -> Iterator[bytes]:
    if isinstance(data, bytes):
        yield data
        return
    view = memoryview(data).cast("B")
    for start in range(0, len(view), _PIECE):
        yield bytes(view[start : start + _PIECE])


_ALGORITHMS: dict[str, tuple[Callable[[Buffer], str], int]] = {"xxh3_64": (_xxh3_64, 16), "crc32c": (_crc32c, 8)}

ALGORITHMS = tuple(_ALGORITHMS)


def digest(algorithm: str, data: Buffer) -> str:
    """The checksum of `data` (contiguous) in lower-case hex; KeyError for an algorithm that is not in ALGORITHMS."""
    return _ALGORITHMS[algorithm][0](data)


def width(algorithm: str) -> int:
    """Hex digits of a checksum; KeyError for an algorithm that is not in ALGORITHMS."""
    return _ALGORITHMS[algorithm][1]
