"""The S3 store against a real server: where it is, how parts go, who is first, what is swept."""

from __future__ import annotations

import re
import threading
import time
import uuid
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from everstep.checkpoint.errors import Denied, StoreError, is_damage
from everstep.checkpoint.store.base import open_store
from everstep.checkpoint.store.retry import Retry
from everstep.checkpoint.store.s3 import S3Store
from everstep.checkpoint.store.s3_client import S3Location
from everstep.checkpoint.store.s3_upload import part_size_for, split_parts
from tests.checkpoint.faults import Fault, FaultProxy, Request, nth
from tests.checkpoint.s3_server import BUCKET, S3Server

PART = "data/0000000000.0000000001/000000000010/00000.part"
MIB = 1 << 20
QUICK = Retry(first=0.001, longest=0.01)


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("s3://bucket", S3Location("bucket", "")),
        ("s3://bucket/", S3Location("bucket", "")),
        ("s3://bucket/a/b", S3Location("bucket", "a/b/")),
        ("s3://bucket//a//b/", S3Location("bucket", "a/b/")),
        (
            "s3://bucket/run?endpoint=https://minio.example:9000&region=eu-1&profile=me",
            S3Location("bucket", "run/", "https://minio.example:9000", "eu-1", "me"),
        ),
    ],
)
def test_a_url_says_where_a_store_is(url: str, place: S3Location) -> None:
    assert S3Location.parse(url) == place
    assert S3Location.parse(place.url) == place


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("s3://", "not s3://BUCKET"),
        ("s3:///a", "not s3://BUCKET"),
        ("s3://key:secret@bucket/a", "not s3://BUCKET"),
        ("s3://bucket/a?endpont=http://x", "has endpont; known are endpoint, region, profile"),
    ],
)
def test_a_url_that_says_something_else_is_refused(url: str, why: str) -> None:
    with pytest.raises(ValueError, match=re.escape(why)):
        S3Location.parse(url)


def test_an_unknown_profile_is_said_at_once() -> None:
    with pytest.raises(StoreError, match="nobody-has-this"):
        open_store("s3://bucket/a?profile=nobody-has-this")


def test_parts_are_what_was_given_in_other_portions() -> None:
    data = bytes(range(250)) * 4
    pieces = [memoryview(data)[start : start + 170] for start in range(0, len(data), 170)]
    for size in (1, 7, 170, 999, 1000, 5000):
        parts = list(split_parts(pieces, len(data), size))
        assert b"".join(parts) == data
        assert {len(part) for part in parts[:-1]} <= {size}
        assert 0 < len(parts[-1]) <= size


def test_ten_thousand_parts_are_enough_for_any_object() -> None:
    assert part_size_for(100, 16 * MIB) == 16 * MIB
    size = 5 << 40
    assert size / part_size_for(size, 16 * MIB) <= 10_000


def test_repetitions_are_bounded_and_spread() -> None:
    def fail() -> None:
        raise StoreError("no", "there", may_pass=True)

    rounds: list[list[float]] = []
    for _ in range(100):
        rounds.append([])
        with pytest.raises(StoreError, match="no"):
            Retry(tries=6, first=1, longest=5, sleep=rounds[-1].append)(fail)
    for bound, waits in zip([1, 2, 4, 5, 5], zip(*rounds, strict=True), strict=True):
        assert 0 <= min(waits) < bound / 4
        assert bound / 2 < max(waits) <= bound


def test_what_takes_long_to_fail_is_not_repeated_beyond_a_time() -> None:
    calls: list[int] = []

    def fail() -> None:
        calls.append(1)
        time.sleep(0.2)
        raise StoreError("silent", "there", may_pass=True)

    with pytest.raises(StoreError, match="silent"):
        Retry(tries=9, first=0.001, within=0.1)(fail)
    assert calls == [1]


def test_what_cannot_pass_is_not_repeated() -> None:
    calls: list[int] = []

    def fail() -> None:
        calls.append(1)
        raise StoreError("forbidden", "there")

    with pytest.raises(StoreError, match="forbidden"):
        Retry(sleep=lambda _: None)(fail)
    assert len(calls) == 1


def open_quickly(url: str) -> S3Store:
    return S3Store(url, part_size=5 * MIB, threads=3, read_timeout=0.5, retry=QUICK)


@pytest.fixture
def spied(proxy: FaultProxy, s3_url: str) -> tuple[S3Store, FaultProxy]:
    """A store with parts of 5 MiB behind a proxy that sees its requests."""
    prefix = urlsplit(s3_url).path.strip("/")
    url = f"s3://{BUCKET}/{prefix}?endpoint={proxy.endpoint}"
    return open_quickly(url), proxy


@pytest.mark.integration
class TestServer:
    def test_a_large_object_goes_in_parts_and_arrives_whole(self, s3_url: str) -> None:
        store = S3Store(s3_url, part_size=5 * MIB, threads=3)
        data = memoryview(bytes(range(256)) * (MIB // 256) * 18)
        store.put(PART, (data[start : start + 3 * MIB] for start in range(0, len(data), 3 * MIB)), len(data))
        into = bytearray(len(data))
        store.read_into(PART, 0, memoryview(into))
        assert into == data
        assert [entry.size for entry in store.list("")] == [len(data)]
        assert store.sweep("", time.time() + 60) == 0

    def test_few_parts_are_in_memory_whatever_the_size(self, s3_url: str) -> None:
        store = S3Store(s3_url, part_size=5 * MIB, threads=2)
        taken = 0
        ahead: list[int] = []
        sent = threading.Semaphore(0)
        put = store._client.upload_part

        def upload_part(**arguments: object) -> object:
            answer = put(**arguments)
            ahead.append(taken - 5 * MIB * len(ahead))
            sent.release()
            return answer

        store._client.upload_part = upload_part

        def pieces() -> Iterator[bytes]:
            nonlocal taken
            for _ in range(12):
                taken += 5 * MIB
                yield bytes(5 * MIB)

        store.put(PART, pieces(), 60 * MIB)
        assert len(ahead) == 12
        assert max(ahead) <= 5 * 5 * MIB

    def test_the_server_refuses_a_part_that_was_damaged_on_its_way(
        self, s3_url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = S3Store(s3_url, retry=Retry(tries=2, first=0))
        monkeypatch.setattr("everstep.checkpoint.store.s3.compute_crc32c_base64", lambda _: "AAAAAA==")
        with pytest.raises(StoreError, match="BadDigest") as caught:
            store.put(PART, [b"abc"], 3)
        assert caught.value.may_pass
        assert list(store.list("")) == []

    def test_an_upload_that_fails_leaves_nothing(self, spied: tuple[S3Store, FaultProxy]) -> None:
        store, proxy = spied
        proxy.begin(lambda _, request: Fault.ERROR if "partNumber=3" in request.path else None)
        with pytest.raises(StoreError, match="part 3"):
            store.put(PART, [bytes(20 * MIB)], 20 * MIB)
        proxy.begin()
        assert list(store.list("")) == []
        assert store.sweep("", time.time() + 60) == 0

    def test_uploads_that_died_are_swept_by_age(self, s3: S3Server, s3_url: str) -> None:
        store = S3Store(s3_url)
        key = f"{store._place.prefix}{PART}"
        store._client.create_multipart_upload(Bucket=BUCKET, Key=key)
        assert store.sweep("", time.time() - 60) == 0
        assert store.sweep("leases/", time.time() + 60) == 0
        assert store.sweep("data/", time.time() + 60) == 1
        assert store.sweep("data/", time.time() + 60) == 0

    def test_a_store_at_the_root_of_a_bucket_leaves_the_uploads_of_other_programs(
        self, s3_url: str, spied: tuple[S3Store, FaultProxy]
    ) -> None:
        client = spied[0]._client
        bucket = f"shared-{uuid.uuid4().hex}"
        client.create_bucket(Bucket=bucket)
        endpoint = s3_url.partition("?")[2]
        store = S3Store(f"s3://{bucket}?{endpoint}")
        foreign = ["backup.tar", "data/backup.tar", "data/a/b/c", "manifests/backup.tar"]
        for name in (*foreign, PART):
            client.create_multipart_upload(Bucket=bucket, Key=name)
        assert store.sweep("", time.time() + 60) == 1
        left = client.list_multipart_uploads(Bucket=bucket).get("Uploads", [])
        assert {upload["Key"] for upload in left} == set(foreign)

    @pytest.mark.parametrize(
        ("status", "code"),
        [(400, "MissingContentMD5"), (400, "InvalidRequest"), (405, "MethodNotAllowed"), (501, "NotImplemented")],
    )
    def test_a_server_that_rejects_to_remove_many_at_once_removes_each(
        self, spied: tuple[S3Store, FaultProxy], status: int, code: str
    ) -> None:
        store, proxy = spied
        names = ["data/a", "data/b", "latest"]
        for name in names:
            store.replace(name, b"x")
        proxy.refuse = lambda request: (status, code) if request.path.endswith("?delete") else None
        store.delete([*names[:2], "data/absent"])
        assert [entry.name for entry in store.list("")] == ["latest"]
        proxy.begin()
        store.delete(["latest"])
        assert [request.method for request in proxy.requests] == ["DELETE"], "it is asked once"

    @pytest.mark.parametrize(("status", "code"), [(403, "AccessDenied"), (501, "NotImplemented")])
    def test_uploads_that_may_not_be_listed_are_nobodys_failure(
        self, spied: tuple[S3Store, FaultProxy], caplog: pytest.LogCaptureFixture, status: int, code: str
    ) -> None:
        store, proxy = spied
        proxy.refuse = lambda request: (status, code) if "uploads" in request.path else None
        assert store.sweep("", time.time() + 60) == store.sweep("", time.time() + 60) == 0
        assert caplog.text.count("AbortIncompleteMultipartUpload") == 1

    @pytest.mark.parametrize(
        ("status", "code"),
        [(400, "ExpiredToken"), (400, "KMS.DisabledException"), (403, "AccessDenied")],
    )
    def test_whose_token_has_expired_is_told_so_and_the_object_is_not_taken_for_damaged(
        self, spied: tuple[S3Store, FaultProxy], status: int, code: str
    ) -> None:
        store, proxy = spied
        store.replace("latest", b"x")
        proxy.refuse = lambda request: (status, code)
        with pytest.raises(Denied, match=code) as refused:
            store.read("latest")
        assert not is_damage(refused.value)

    def test_more_objects_than_one_answer_holds(self, s3_url: str) -> None:
        store = S3Store(s3_url)
        names = {f"leases/{number:05d}.json" for number in range(1001)}
        for name in names:
            store.replace(name, b"")
        assert {entry.name for entry in store.list("leases/")} == names
        store.delete(names)
        assert list(store.list("")) == []

    def test_whether_the_server_decides_is_asked_once_and_leaves_nothing(
        self, spied: tuple[S3Store, FaultProxy]
    ) -> None:
        store, proxy = spied
        assert store.put_if_absent("manifests/1.json", b"one")
        assert [entry.name for entry in store.list("")] == ["manifests/1.json"]
        proxy.begin()
        assert store.put_if_absent("manifests/2.json", b"two")
        assert not store.put_if_absent("manifests/1.json", b"three")
        assert [request.method for request in proxy.requests] == ["PUT", "PUT"]
        assert store.read("manifests/1.json") == b"one"

    @pytest.mark.parametrize("fault", list(Fault))
    def test_who_was_first_is_found_out_after_a_lost_answer(
        self, spied: tuple[S3Store, FaultProxy], fault: Fault
    ) -> None:
        store, proxy = spied
        count = 0
        while True:
            count += 1
            name = f"manifests/{fault.name}-{count}.json"
            proxy.begin(nth(count, fault))
            assert store.put_if_absent(name, b"mine"), f"request {count}"
            seen = len(proxy.requests)
            proxy.begin(nth(count, fault))
            assert not store.put_if_absent(name, b"mine"), f"request {count}"
            assert not open_quickly(store.url).put_if_absent(name, b"mine"), f"request {count}"
            if seen < count:
                break
        assert count > 1

    def test_a_server_that_ignores_conditions_gets_the_weaker_rule(
        self, spied: tuple[S3Store, FaultProxy], caplog: pytest.LogCaptureFixture
    ) -> None:
        store, _ = spied
        put = store._client.put_object
        store._client.put_object = lambda IfNoneMatch="", **rest: put(**rest)
        assert store.put_if_absent("manifests/1.json", b"one")
        assert "does not honour If-None-Match" in caplog.text
        assert not store.put_if_absent("manifests/1.json", b"two")
        assert store.put_if_absent("manifests/2.json", b"two")
        assert store.read("manifests/1.json") == b"one"
        assert store.read("manifests/2.json") == b"two"

    def test_errors_say_where_and_what(self, s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(StoreError, match=r"s3://no-such-bucket/a/latest: cannot read: .*NoSuchBucket") as caught:
            S3Store(f"s3://no-such-bucket/a?endpoint={s3.endpoint}").read("latest")
        assert not caught.value.may_pass
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
        with pytest.raises(StoreError, match="SignatureDoesNotMatch"):
            S3Store(s3.url("a")).read("latest")
        with pytest.raises(StoreError, match="Could not connect") as caught:
            S3Store(s3.url("a", "http://127.0.0.1:9"), retry=QUICK).read("latest")
        assert caught.value.may_pass


@pytest.mark.integration
@pytest.mark.parametrize("fault", list(Fault))
def test_every_call_survives_a_fault_at_each_of_its_requests(spied: tuple[S3Store, FaultProxy], fault: Fault) -> None:
    """One fault of a kind at each request of a sequence of all calls: nothing of it is seen by the caller."""
    store, proxy = spied
    data = bytes(range(256)) * (11 * MIB // 256)

    def everything(run: int) -> None:
        store._decides = None  # as if it were new: that question is part of what is disturbed
        part, manifest = f"data/{run}/00000.part", f"manifests/{run}.json"
        store.put(part, [data], len(data))
        assert store.put_if_absent(manifest, b"m")
        store.replace("latest", manifest.encode())
        assert store.read("latest") == manifest.encode()
        into = bytearray(MIB)
        store.read_into(part, 3 * MIB + 5, memoryview(into))
        assert into == data[3 * MIB + 5 : 4 * MIB + 5]
        assert {entry.name for entry in store.list("")} == {part, manifest, "latest"}
        store.delete([part, manifest, "latest"])
        store.sweep("", time.time() + 60)
        assert list(store.list("")) == []

    proxy.begin()
    everything(0)
    requests = len(proxy.requests)
    for number in range(1, requests + 1):
        proxy.begin(nth(number, fault))
        everything(number)
        assert len(proxy.requests) >= number, "the fault befell nothing"


@pytest.mark.integration
@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT"])
def test_an_answer_may_end_anywhere(spied: tuple[S3Store, FaultProxy], method: str) -> None:
    store, proxy = spied
    store.replace("latest", b"x")
    length = 1

    def keep(answer: bytes) -> int:
        nonlocal length
        length = answer.index(b"\r\n\r\n") + 4
        return min(cut, len(answer))

    proxy.keep = keep
    cut = 0
    while cut < length:
        proxy.begin(nth(1, Fault.CUT))
        match method:
            case "GET":
                assert store.read("latest") == b"x"
            case "HEAD":
                assert store._repeat(lambda: store._head("latest"))
            case "PUT":
                store.replace("latest", b"x")
        assert proxy.requests[0].method == method
        cut += 3  # every byte takes ten seconds


@pytest.mark.integration
def test_half_a_listing_is_not_an_empty_store(spied: tuple[S3Store, FaultProxy]) -> None:
    store, proxy = spied
    store.replace("latest", b"x")

    def cut_listings(_: int, request: Request) -> Fault | None:
        return Fault.CUT if "list-type=2" in request.path else None

    proxy.begin(cut_listings)
    with pytest.raises(StoreError) as caught:
        list(store.list(""))
    assert caught.value.may_pass
