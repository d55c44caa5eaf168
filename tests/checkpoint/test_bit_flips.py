"""One flipped bit, a cut file or a missing one: the last good checkpoint is loaded, and verify says what is wrong."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from everstep.checkpoint.catalog.candidates import read_index, read_manifest, verify_checkpoint
from everstep.checkpoint.errors import CheckpointError
from everstep.checkpoint.format.keys import HINT
from everstep.checkpoint.format.manifest import HEADER, Manifest
from everstep.checkpoint.store.posix import PosixStore
from tests.checkpoint.builders import Training, is_good, key, load
from tests.checkpoint.crash import everything, in_memory

GOOD, NEWEST = key(10), key(20)

trainings = pytest.mark.parametrize(
    "training",
    [Training(rows=4, chunk=100), Training(rows=4, chunk=100, checksum="crc32c")],
    ids=lambda training: training.checksum,
)

# Where each change has the same meaning, every seventh is tried in seconds, and all of them by the long sweeps.
thinned = pytest.mark.parametrize("stride", [pytest.param(1, marks=pytest.mark.chaos), 7])


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    with in_memory(tmp_path) as found:
        yield found


class Saved:
    """Two checkpoints in a folder; one file of the newer is changed at a time, and put back."""

    def __init__(self, folder: Path, training: Training) -> None:
        self.folder, self.training, self.store = folder, training, PosixStore(folder)
        training.save(self.store, GOOD)
        self.manifest = training.save(self.store, NEWEST)

    def check(self, name: str, data: bytes | None, needed: bool = True) -> None:
        """With `data` in `name` (None: missing), what is loaded is right; if the file is `needed`, the older one."""
        path = self.folder / name
        before = path.read_bytes()
        if data is None:
            path.unlink()
        else:
            path.write_bytes(data)
        loaded = load(self.store)
        assert loaded.key == (GOOD if needed else NEWEST), name
        assert is_good(self.training, loaded), name
        if needed:
            assert name in loaded.fell_back[0]
            with pytest.raises(CheckpointError, match=name):
                verify_checkpoint(self.store, NEWEST)
        path.write_bytes(before)


def flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def regions(manifest: Manifest, part: int) -> list[tuple[int, int]]:
    """(start, stop) of each chunk in a part, in order."""
    chunks = [
        (chunk.offset, chunk.offset + chunk.length)
        for tensor in manifest.tensors.values()
        for shard in tensor.shards
        for chunk in shard.chunks
        if chunk.part == part
    ]
    return sorted(chunks)


@thinned
@trainings
def test_a_flipped_bit_of_a_manifest(folder: Path, training: Training, stride: int) -> None:
    """One bit of each byte, on both lines: every bit of a manifest is tried by the test of the format."""
    saved = Saved(folder, training)
    name = NEWEST.manifest_name
    data = saved.store.read(name)
    for byte in range(0, len(data), stride):
        saved.check(name, flipped(data, byte * 8 + byte % 8))


@thinned
def test_a_node_manifest_that_is_flipped_cut_or_missing(folder: Path, stride: int) -> None:
    saved = Saved(folder, Training(rows=1))
    for node in read_index(saved.store, NEWEST).nodes:
        data = saved.store.read(node.name)
        for byte in range(0, len(data), stride):
            saved.check(node.name, flipped(data, byte * 8 + byte % 8))
        for size in range(0, len(data), 7 * stride):
            saved.check(node.name, data[:size])
        saved.check(node.name, None)


@trainings
def test_a_flipped_bit_of_a_chunk(folder: Path, training: Training) -> None:
    """The first and the last bit of each chunk of each part, and one inside."""
    saved = Saved(folder, training)
    for number, part in enumerate(saved.manifest.parts):
        data = saved.store.read(part.name)
        for start, stop in regions(saved.manifest, number):
            for bit in (start * 8, (start + stop) * 4 + 3, stop * 8 - 1):
                saved.check(part.name, flipped(data, bit))


@thinned
def test_every_flipped_bit_of_a_chunk_changes_its_sum(folder: Path, stride: int) -> None:
    """All bits of one chunk, through the same check as a reader's."""
    saved = Saved(folder, Training(rows=1, chunk=64))
    part = saved.manifest.parts[1]
    data = saved.store.read(part.name)
    ((start, stop),) = regions(saved.manifest, 1)
    for bit in range(start * 8, stop * 8, stride):
        saved.check(part.name, flipped(data, bit))


@trainings
def test_a_flipped_bit_of_a_header_is_found_by_verify(folder: Path, training: Training) -> None:
    """The header is for people who find a stray file: no state is in it, so what is loaded is right in any case."""
    saved = Saved(folder, training)
    for part in saved.manifest.parts:
        data = saved.store.read(part.name)
        for byte in range(0, HEADER, 61):
            (folder / part.name).write_bytes(flipped(data, byte * 8 + byte % 8))
            assert is_good(training, load(saved.store))
            with pytest.raises(CheckpointError, match="are not those that were written"):
                verify_checkpoint(saved.store, NEWEST)
        (folder / part.name).write_bytes(data)


@trainings
def test_a_flipped_bit_between_tensors_is_never_read(folder: Path, training: Training) -> None:
    saved = Saved(folder, training)
    count = 0
    for number, part in enumerate(saved.manifest.parts):
        data = saved.store.read(part.name)
        chunks = [(0, HEADER), *regions(saved.manifest, number), (len(data), len(data))]
        for (_, start), (stop, _) in pairwise(chunks):
            for byte in range(start, stop):
                saved.check(part.name, flipped(data, byte * 8 + byte % 8), needed=False)
                count += 1
    assert count > 10


@thinned
@pytest.mark.parametrize("name", [HINT, NEWEST.node_name(0), NEWEST.node_name(1)])
def test_what_is_not_read_may_be_flipped_cut_or_missing(folder: Path, name: str, stride: int) -> None:
    saved = Saved(folder, Training(rows=1))
    data = saved.store.read(name)
    for byte in range(0, len(data), stride):
        saved.check(name, flipped(data, byte * 8 + byte % 8), needed=False)
    for size in range(0, len(data), 7 * stride):
        saved.check(name, data[:size], needed=False)
    saved.check(name, None, needed=False)


@thinned
@trainings
def test_a_cut_file(folder: Path, training: Training, stride: int) -> None:
    """Manifests at every third length; parts at, and one byte before, each end of a chunk and of the header."""
    saved = Saved(folder, training)
    data = saved.store.read(NEWEST.manifest_name)
    for size in range(0, len(data), 3 * stride):
        saved.check(NEWEST.manifest_name, data[:size])
    for number, part in enumerate(saved.manifest.parts):
        data = saved.store.read(part.name)
        chunks = regions(saved.manifest, number)
        sizes = {0, 1, HEADER - 1, HEADER, *(end - 1 for _, end in chunks), *(end for _, end in chunks[:-1])}
        for size in sizes:
            saved.check(part.name, data[:size])


@trainings
def test_a_missing_file(folder: Path, training: Training) -> None:
    saved = Saved(folder, training)
    for part in saved.manifest.parts:
        saved.check(part.name, None)
    (folder / NEWEST.manifest_name).unlink()
    assert load(saved.store).key == GOOD  # without a manifest there is no checkpoint, and no reason to name
    assert is_good(training, load(saved.store))


@trainings
def test_a_file_of_another_checkpoint_in_its_place(folder: Path, training: Training) -> None:
    saved = Saved(folder, training)
    for old, new in zip(read_manifest(saved.store, GOOD).parts, saved.manifest.parts, strict=True):
        saved.check(new.name, saved.store.read(old.name))
    saved.check(NEWEST.manifest_name, saved.store.read(GOOD.manifest_name))
    saved.check(NEWEST.manifest_name, saved.store.read(NEWEST.node_name(0)))


def test_when_nothing_is_good_nothing_is_loaded(folder: Path) -> None:
    saved = Saved(folder, Training(rows=1))
    for name, data in everything(folder).items():
        if name.endswith(".part"):
            (folder / name).write_bytes(flipped(data, 8 * HEADER))
    loaded = load(saved.store)
    assert loaded.key is None
    assert len(loaded.fell_back) == 2
    shutil.rmtree(folder / "manifests")
    assert load(saved.store).fell_back == ()
