"""One object to S3, in parts, a few at a time: bounded memory, every part with a checksum that the server checks."""

from __future__ import annotations

import base64
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from everstep.checkpoint.errors import StoreError
from everstep.checkpoint.format.checksum import compute_checksum
from everstep.checkpoint.host.thread_pool import ThreadPool
from everstep.checkpoint.store.retry import Retry
from everstep.checkpoint.store.s3_client import translate_errors

_MOST_PARTS = 10_000  # of S3


def compute_crc32c_base64(data: bytes | bytearray) -> str:
    """Base64 of the big-endian checksum, as S3 wants it."""
    return base64.b64encode(bytes.fromhex(compute_checksum("crc32c", data))).decode()


def part_size_for(size: int, part_size: int) -> int:
    """`part_size`, or the bytes of a part that make an object of `size` bytes fit S3's ten thousand."""
    return max(part_size, -(-size // _MOST_PARTS))


def split_parts(data: Iterable[bytes | memoryview], size: int, part_size: int) -> Iterator[bytearray]:
    """Yield the same bytes in parts of `part_size`, the last one shorter; one empty part for no bytes.

    ValueError if there are not `size` of them, before the last part is given away.
    """
    part, count = bytearray(), 0
    for piece in data:
        rest = memoryview(piece).cast("B")
        count += len(rest)
        while len(rest) > part_size - len(part):
            room = part_size - len(part)
            part += rest[:room]
            rest = rest[room:]
            yield part
            part = bytearray()
        part += rest
    if count != size:
        raise ValueError(f"{size} bytes were promised, {count} came")
    yield part


class Upload:
    """A multipart upload of one object. Until finish() nobody sees anything of it; what died is swept."""

    def __init__(self, client: Any, repeat: Retry, target: dict[str, str], where: str) -> None:
        self._client, self._repeat, self._object, self._where = client, repeat, target, where

    def send(self, parts: Iterable[bytearray], threads: int) -> None:
        """All parts in order; at most `threads` and one more are in memory. StoreError: the object is not there."""
        self._id = self._repeat(self._begin)
        try:
            with ThreadPool(threads, thread_name_prefix="s3-upload") as pool:
                sent = self._send_all(parts, pool, threading.Semaphore(threads))
            self._finish(sent)
        except BaseException:
            with suppress(Exception), translate_errors("give up the upload of", self._where):
                self._client.abort_multipart_upload(**self._object, UploadId=self._id)
            raise

    def _begin(self) -> str:
        with translate_errors("write", self._where):
            answer = self._client.create_multipart_upload(**self._object, ChecksumAlgorithm="CRC32C")
        return str(require_field(answer, "UploadId", self._where))

    def _send_all(
        self, parts: Iterable[bytearray], pool: ThreadPool, room: threading.Semaphore
    ) -> list[dict[str, Any]]:
        failed = threading.Event()

        def send(number: int, part: bytearray) -> dict[str, Any]:
            try:
                return self._repeat(lambda: self._send(number, part))
            except BaseException:
                failed.set()
                raise
            finally:
                room.release()

        sent: list[Future[dict[str, Any]]] = []
        for number, part in enumerate(parts, 1):
            room.acquire()
            if failed.is_set():
                break
            sent.append(pool.submit(send, number, part))
        return [future.result() for future in sent]

    def _send(self, number: int, part: bytearray) -> dict[str, Any]:
        checksum = compute_crc32c_base64(part)
        with translate_errors(f"write part {number} of", self._where):
            answer = self._client.upload_part(
                **self._object, UploadId=self._id, PartNumber=number, Body=part, ChecksumCRC32C=checksum
            )
        etag = require_field(answer, "ETag", self._where)
        return {"PartNumber": number, "ETag": etag, "ChecksumCRC32C": checksum}

    def _finish(self, sent: list[dict[str, Any]]) -> None:
        doubtful = False

        def finish() -> None:
            nonlocal doubtful
            try:
                with translate_errors("finish", self._where):
                    answer = self._client.complete_multipart_upload(
                        **self._object, UploadId=self._id, MultipartUpload={"Parts": sent}
                    )
                require_field(answer, "ETag", self._where)
            except StoreError:
                # A finished upload is unknown afterwards: a repetition after a lost answer may be refused for good.
                if doubtful and self._is_there(sent):
                    return
                doubtful = True
                raise

        try:
            self._repeat(finish)
        except StoreError:
            if not self._is_there(sent):
                raise

    def _is_there(self, sent: list[dict[str, Any]]) -> bool:
        try:
            with translate_errors("look at", self._where):
                head = self._client.head_object(**self._object, ChecksumMode="ENABLED")
        except StoreError:
            return False
        # The checksum of a composite object: of its parts' checksums, and how many they are.
        sums = b"".join(base64.b64decode(part["ChecksumCRC32C"]) for part in sent)
        return bool(head.get("ChecksumCRC32C") == f"{compute_crc32c_base64(sums)}-{len(sent)}")


def require_field(answer: dict[str, Any], field: str, where: str) -> Any:
    """`field` of an answer; a StoreError that may pass if the answer came without it, cut off on its way."""
    if field not in answer:
        raise StoreError(f"the answer has no {field}", where, may_pass=True)
    return answer[field]
