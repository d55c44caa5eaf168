"""S3 and whatever speaks its protocol.

An object appears whole or not at all, and is durable when the server says so; every byte is sent with a crc32c which
the server checks. Who was first is decided by the server (`If-None-Match: *`). A server that ignores that is found out
with the first object itself: sending it a second time must be refused. It then gets the weaker rule: look, write, look
again. Two writers of one name within the same moment can both believe to have been first; names carry the attempt, so
that this takes the same attempt running twice.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from everstep.checkpoint.errors import Damaged, Denied, Missing, StoreError
from everstep.checkpoint.format.keys import DATA, Key
from everstep.checkpoint.store.base import StoredObject, check_name, is_name
from everstep.checkpoint.store.retry import Retry
from everstep.checkpoint.store.s3_client import OutOfRange, S3Location, Taken, Unknown, translate_errors
from everstep.checkpoint.store.s3_upload import Upload, compute_crc32c_base64, part_size_for, require_field, split_parts

_log = logging.getLogger(__name__)

_BATCH = 1000  # names in one request to delete, of S3
_PIECE = 1 << 20  # bytes of an answer that are held beside the caller's memory
_RANGE = re.compile(r"bytes (\d+)-(\d+)/(?:\d+|\*)", re.ASCII)
_WRITER = "everstep-writer"  # metadata: which call wrote the object


class S3Store:
    """Objects below a prefix of a bucket.

    `part_size` in bytes (S3 takes no part below 5 MiB but the last); up to `threads` parts of an object are on their
    way at a time. A request fails after `connect_timeout` or `read_timeout` seconds of silence, and is repeated.
    """

    def __init__(
        self,
        url: str,
        *,
        part_size: int = 16 << 20,
        threads: int = 8,
        connect_timeout: float = 5.0,
        read_timeout: float = 30.0,
        retry: Retry | None = None,
    ) -> None:
        self._place = S3Location.parse(url)
        self._part_size, self._threads = part_size, threads
        self._repeat = retry or Retry()
        self._client: Any = self._place.client(
            connections=4 * threads, connect_timeout=connect_timeout, read_timeout=read_timeout
        )
        self._decides: bool | None = None  # whether the server honours If-None-Match; None: not known yet
        self._removes_many = True  # in one request, until the server rejects that
        self._told_of_uploads = False  # that those that died stay, as the server does not show them to us

    @property
    def url(self) -> str:
        return self._place.url

    def put(self, name: str, data: Iterable[bytes | memoryview], size: int) -> None:
        where = self._where(name)
        parts = split_parts(data, size, part_size_for(size, self._part_size))
        if size > self._part_size:
            Upload(self._client, self._repeat, self._object(name), where).send(parts, self._threads)
            return
        (whole_object,) = parts
        self._repeat(lambda: self._put(name, whole_object))

    def put_whole(self, name: str, data: Iterable[bytes | memoryview], size: int) -> None:
        self.put(name, data, size)  # objects are whole or not there, and a failed upload leaves what was there

    def put_if_absent(self, name: str, data: bytes) -> bool:
        writer = secrets.token_hex(16)
        doubtful = False

        def put() -> bool:
            nonlocal doubtful
            try:
                return self._put_if_absent(name, data, writer)
            except Taken:
                # An earlier try, whose answer was lost, may be what is there.
                return doubtful and self._writer(name) == writer
            except StoreError as error:
                doubtful = doubtful or error.may_pass
                raise

        try:
            return self._repeat(put)
        except StoreError:
            if not doubtful or self._repeat(lambda: self._head(name)) is None:
                raise
            return self._repeat(lambda: self._writer(name)) == writer

    def replace(self, name: str, data: bytes) -> None:
        self._repeat(lambda: self._put(name, data))

    def read(self, name: str) -> bytes:
        where, target = self._where(name), self._object(name)

        def read() -> bytes:
            with translate_errors("read", where):
                answer = self._client.get_object(**target)
                data: bytes = answer["Body"].read()
            if len(data) != require_field(answer, "ContentLength", where):
                raise StoreError("the answer was cut off", where, may_pass=True)
            return data

        return self._repeat(read)

    def read_into(self, name: str, offset: int, into: memoryview) -> None:
        into = into.cast("B")
        if not into:
            if self._repeat(lambda: self._head(name)) is None:
                raise Missing(self._where(name))
            return
        self._repeat(lambda: self._read_into(name, offset, into))

    def list(self, prefix: str) -> Iterator[StoredObject]:
        start = len(self._place.prefix)
        more: dict[str, str] = {}
        while True:
            answer = self._repeat(partial(self._page, prefix, more))
            for found in answer.get("Contents", ()):
                if is_name(name := found["Key"][start:]):
                    yield StoredObject(name, found["Size"], found["LastModified"].timestamp())
            if not answer["IsTruncated"]:
                return
            more = {"ContinuationToken": answer["NextContinuationToken"]}

    def delete(self, names: Iterable[str]) -> None:
        keys = [self._object(name)["Key"] for name in names]
        for start in range(0, len(keys), _BATCH):
            batch = keys[start : start + _BATCH]
            if self._removes_many:
                try:
                    self._repeat(partial(self._delete, batch))
                    continue
                except StoreError as error:
                    if error.may_pass or isinstance(error, Denied):
                        raise
            # Many servers want a Content-MD5 there, which boto3 sends no more, and some know no such request.
            for key in batch:
                self._repeat(partial(self._delete_one, key))
            self._removes_many = False

    def sweep(self, prefix: str, before: float) -> int:
        # Only parts are large enough for uploads; at the root of a bucket, others are those of other programs.
        if not (prefix.startswith(DATA) or DATA.startswith(prefix)):
            return 0
        start = len(self._place.prefix)
        try:
            stale = [
                upload
                for upload in self._uploads(max(prefix, DATA, key=len))
                if upload["Initiated"].timestamp() < before and _is_data(upload["Key"][start:])
            ]
            for upload in stale:
                target = {"Bucket": self._place.bucket, "Key": upload["Key"], "UploadId": upload["UploadId"]}
                self._repeat(partial(self._give_up, target))
        except (Denied, Unknown) as error:  # nothing that is there for anybody stays because of it
            if not self._told_of_uploads:
                _log.warning(
                    "uploads that died are not removed from %s (%s): allow s3:ListBucketMultipartUploads and "
                    "s3:AbortMultipartUpload, or give the bucket a rule with AbortIncompleteMultipartUpload",
                    self.url,
                    error,
                )
            self._told_of_uploads = True
            return 0
        return len(stale)

    def _put(self, name: str, data: bytes | bytearray, writer: str = "", **conditions: str) -> None:
        target = self._object(name)
        with translate_errors("write", self._where(name)):
            self._client.put_object(
                **target,
                Body=data,
                ChecksumCRC32C=compute_crc32c_base64(data),
                Metadata={_WRITER: writer} if writer else {},
                **conditions,
            )

    def _put_if_absent(self, name: str, data: bytes, writer: str) -> bool:
        """True: `writer` was first. Taken: there is one, maybe of an earlier try of the same writer."""
        decides = self._decides  # once: another thread may find it out meanwhile
        if decides:
            self._put(name, data, writer, IfNoneMatch="*")
            return True
        if self._head(name) is not None:
            raise Taken("there is one of this name", self._where(name))
        if decides is None:
            decides = self._decides = self._first(name, data, writer)
        else:
            self._put(name, data, writer)
        return decides is not False or self._writer(name) == writer

    def _first(self, name: str, data: bytes, writer: str) -> bool | None:
        """Write the object and tell whether the server decides who is first; None if that could not be found out."""
        try:
            self._put(name, data, writer, IfNoneMatch="*")
        except Unknown:
            self._put(name, data, writer)
            return self._weaker()
        try:
            self._put(name, data, writer, IfNoneMatch="*")
        except Taken:
            return True
        except StoreError:
            return None
        return self._weaker()

    def _weaker(self) -> bool:
        _log.warning(
            "%s does not honour If-None-Match: two runs of the same attempt could overwrite each other", self.url
        )
        return False

    def _writer(self, name: str) -> str:
        """Return which call of put_if_absent wrote the object.

        Raises:
            StoreError: The answer does not say so; the error may pass.
            Missing: There is no such object.
        """
        head = self._head(name)
        if head is None:
            raise Missing(self._where(name))
        return str(require_field(head.get("Metadata", {}), _WRITER, self._where(name)))

    def _head(self, name: str) -> dict[str, Any] | None:
        target = self._object(name)
        try:
            with translate_errors("look at", self._where(name)):
                head: dict[str, Any] = self._client.head_object(**target)
        except Missing:
            return None
        return head

    def _read_into(self, name: str, offset: int, into: memoryview) -> None:
        where, target = self._where(name), self._object(name)
        try:
            with translate_errors("read", where):
                answer = self._client.get_object(**target, Range=f"bytes={offset}-{offset + len(into) - 1}")
                came = _fill_from_body(into, answer["Body"])
        except OutOfRange:
            raise Damaged(name, f"ends before byte {offset}") from None
        there = _RANGE.fullmatch(require_field(answer, "ContentRange", where))
        if there is None or int(there[1]) != offset:
            raise StoreError(f"another range came: {answer['ContentRange']}", where, may_pass=True)
        if came == len(into):
            return
        if int(there[2]) + 1 < offset + len(into):
            end = int(there[2]) + 1
            raise Damaged(name, f"ends at byte {end}, {offset + len(into) - end} bytes too early")
        raise StoreError(f"the answer was cut off after {came} bytes", where, may_pass=True)

    def _delete(self, keys: Sequence[str]) -> None:
        names = [{"Key": key} for key in keys]
        with translate_errors("remove objects", self.url):
            answer = self._client.delete_objects(Bucket=self._place.bucket, Delete={"Objects": names, "Quiet": True})
        for error in answer.get("Errors", ()):
            why = f"cannot remove {error.get('Key')}: {error.get('Code')} {error.get('Message', '')}".rstrip()
            raise StoreError(why, self.url, may_pass=error.get("Code") in {"InternalError", "SlowDown"})

    def _delete_one(self, key: str) -> None:
        with suppress(Missing), translate_errors(f"remove {key}", self.url):
            self._client.delete_object(Bucket=self._place.bucket, Key=key)

    def _page(self, prefix: str, more: dict[str, str]) -> dict[str, Any]:
        where = self._where(prefix)
        with translate_errors("list", where):
            answer: dict[str, Any] = self._client.list_objects_v2(
                Bucket=self._place.bucket, Prefix=self._place.prefix + prefix, **more
            )
        # An answer that was cut off must not read as an empty store: training would begin anew.
        require_field(answer, "IsTruncated", where)
        return answer

    def _uploads(self, prefix: str) -> Iterator[dict[str, Any]]:
        more: dict[str, str] = {}
        while True:
            answer = self._repeat(partial(self._page_of_uploads, prefix, more))
            yield from answer.get("Uploads", ())
            if not answer["IsTruncated"]:
                return
            more = {"KeyMarker": answer["NextKeyMarker"], "UploadIdMarker": answer["NextUploadIdMarker"]}

    def _page_of_uploads(self, prefix: str, more: dict[str, str]) -> dict[str, Any]:
        where = self._where(prefix)
        with translate_errors("list the uploads of", where):
            answer: dict[str, Any] = self._client.list_multipart_uploads(
                Bucket=self._place.bucket, Prefix=self._place.prefix + prefix, **more
            )
        require_field(answer, "IsTruncated", where)
        return answer

    def _give_up(self, target: dict[str, str]) -> None:
        with suppress(Missing), translate_errors("give up the upload of", target["Key"]):
            self._client.abort_multipart_upload(**target)

    def _object(self, name: str) -> dict[str, str]:
        return {"Bucket": self._place.bucket, "Key": self._place.prefix + check_name(name)}

    def _where(self, name: str) -> str:
        return f"s3://{self._place.bucket}/{self._place.prefix}{name}"


def _is_data(name: str) -> bool:
    try:
        Key.of_data(name)
    except ValueError:
        return False
    return True


def _fill_from_body(into: memoryview, body: Any) -> int:
    """Return the number of bytes read from `body`: all that fit, or all there are."""
    came = 0
    while came < len(into):
        piece = body.read(min(_PIECE, len(into) - came))
        if not piece:
            break
        into[came : came + len(piece)] = piece
        came += len(piece)
    return came
