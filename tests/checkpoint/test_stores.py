"""Promises of every store, of whatever kind."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from everstep.checkpoint.errors import Damaged, Missing
from everstep.checkpoint.store.base import Store, open_store

PART = "data/0000000000.0000000001/000000000010/00000.part"


def names(store: Store, prefix: str = "") -> list[str]:
    return sorted(entry.name for entry in store.list(prefix))


def test_what_is_put_is_read(store: Store) -> None:
    store.put(PART, [b"abc", memoryview(b"defg")], 7)
    assert store.read(PART) == b"abcdefg"
    into = bytearray(3)
    store.read_into(PART, 2, memoryview(into))
    assert into == b"cde"


def test_nothing_is_an_object_too(store: Store) -> None:
    store.put(PART, [], 0)
    assert store.read(PART) == b""
    store.read_into(PART, 0, memoryview(bytearray()))


def test_what_others_have_put_is_seen(store: Store) -> None:
    other = open_store(store.url)
    assert names(store) == []
    other.put(PART, [b"abc"], 3)
    assert names(store) == [PART]
    other.delete([PART])
    assert names(store) == []


def test_fewer_or_more_bytes_than_promised_make_no_object(store: Store) -> None:
    for size in (2, 4):
        with pytest.raises(ValueError, match=r"bytes were promised"):
            store.put(PART, [b"abc"], size)
    assert names(store) == []


def test_a_read_beyond_the_end_is_damage(store: Store) -> None:
    store.put(PART, [b"abc"], 3)
    with pytest.raises(Damaged, match="ends at byte 3, 2 bytes too early"):
        store.read_into(PART, 1, memoryview(bytearray(4)))
    with pytest.raises(Damaged):
        store.read_into(PART, 3, memoryview(bytearray(1)))
    with pytest.raises(Damaged):
        store.read_into(PART, 1000, memoryview(bytearray(1)))


def test_what_is_not_there_is_missing(store: Store) -> None:
    with pytest.raises(Missing, match="latest"):
        store.read("latest")
    for size in (0, 1):
        with pytest.raises(Missing):
            store.read_into(PART, 0, memoryview(bytearray(size)))
    assert names(store) == []
    store.delete([PART])
    assert store.sweep("", time.time()) == 0


def test_only_the_first_is_written(store: Store) -> None:
    assert store.put_if_absent("manifests/a.json", b"one")
    assert not open_store(store.url).put_if_absent("manifests/a.json", b"two")
    assert not store.put_if_absent("manifests/a.json", b"one")
    assert store.read("manifests/a.json") == b"one"
    assert names(store) == ["manifests/a.json"]


@pytest.mark.parametrize("shared", [True, False], ids=["one store", "a store each"])
def test_one_of_many_is_first(store: Store, shared: bool) -> None:
    if store.url.startswith("memory:"):
        pytest.skip("fsspec's memory looks and writes in two steps")
    together = threading.Barrier(8)

    def put(number: int) -> list[bool]:
        mine = store if shared else open_store(store.url)
        together.wait()
        return [mine.put_if_absent(f"attempts/{attempt}", str(number).encode()) for attempt in range(5)]

    with ThreadPoolExecutor(8) as pool:
        first = list(pool.map(put, range(8)))
    for attempt in range(5):
        assert [mine[attempt] for mine in first].count(True) == 1
        assert first[int(store.read(f"attempts/{attempt}"))][attempt]


def test_a_hint_is_replaced(store: Store) -> None:
    store.replace("latest", b"one")
    store.replace("latest", b"a longer one")
    store.replace("latest", b"two")
    assert store.read("latest") == b"two"


def test_a_listing_tells_names_sizes_and_times(store: Store) -> None:
    before = time.time()
    store.put("data/a/1/00000.part", [b"abc"], 3)
    store.put("data/ab/1/00000.part", [b"abcd"], 4)
    store.replace("latest", b"x")
    assert names(store) == ["data/a/1/00000.part", "data/ab/1/00000.part", "latest"]
    assert names(store, "data/") == ["data/a/1/00000.part", "data/ab/1/00000.part"]
    assert names(store, "data/a/") == ["data/a/1/00000.part"]
    assert names(store, "data/a") == ["data/a/1/00000.part", "data/ab/1/00000.part"]
    assert names(store, "lat") == ["latest"]
    assert names(store, "nothing/") == []
    (entry,) = store.list("data/ab/")
    assert entry.size == 4
    assert before - 2 < entry.modified < time.time() + 2


def test_what_is_removed_is_gone_and_the_rest_stays(store: Store) -> None:
    for number in range(5):
        store.put(f"data/a/1/{number:05d}.part", [b"x"], 1)
    store.delete([f"data/a/1/{number:05d}.part" for number in (0, 1, 3, 7)])
    assert names(store) == ["data/a/1/00002.part", "data/a/1/00004.part"]


def test_threads_read_one_object(store: Store) -> None:
    data = bytes(range(256)) * 64
    store.put(PART, [data], len(data))

    def read(number: int) -> bytes:
        into = bytearray(256)
        store.read_into(PART, number * 256 + 1, memoryview(into)[:255])
        return bytes(into)

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(read, range(64))) == {bytes(range(1, 256)) + b"\0"}


def test_a_store_is_found_again_by_its_url(store: Store) -> None:
    store.put(PART, [b"abc"], 3)
    again = open_store(store.url)
    assert again.url == store.url
    assert again.read(PART) == b"abc"


@pytest.mark.parametrize("name", ["../a", "/a", "a//b", "a/../b", ".hidden", "a/.new", ""])
def test_a_name_that_leads_out_of_the_store_is_refused(store: Store, name: str) -> None:
    with pytest.raises(ValueError, match="not the name"):
        store.read(name)
    with pytest.raises(ValueError, match="not the name"):
        store.put(name, [b""], 0)


def test_objects_of_names_that_no_store_gives_are_somebody_elses(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.put(PART, [b"abc"], 3)
    (tmp_path / PART).with_name("a copy of it (1).part").write_bytes(b"abc")
    assert names(store) == [PART]
    store.delete(names(store))
    assert names(store) == []
