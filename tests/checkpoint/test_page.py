"""The page of the checkpoint format says enough: a reader written from it alone reads a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import google_crc32c
import pytest
import xxhash

from everstep.checkpoint.publish import folder
from everstep.checkpoint.store.posix import PosixStore
from tests.checkpoint.builders import Training, key

# ---- the reader: all that it knows is on the page

SUMS: dict[str, Callable[[bytes], str]] = {
    "xxh3_64": lambda data: f"{xxhash.xxh3_64_intdigest(data):016x}",
    "crc32c": lambda data: f"{google_crc32c.value(data):08x}",
}
SIZES = {"uint8": 1, "bool": 1, "int64": 8, "float32": 4, "bfloat16": 2, "float64": 8}


def newest(store: Path) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The index, with the values of all ranks, and the tensors, row-major, of the newest checkpoint that verifies."""
    found = []
    for path in (store / "manifests").iterdir():
        attempt, _, step = path.name.removesuffix(".json").partition("-")
        if not path.name.startswith(".") and step:
            epoch, _, generation = attempt.partition(".")
            found.append(((int(epoch), int(generation), int(step)), path))
    for _, path in sorted(found, reverse=True):
        try:
            return verified(store, path)
        except (ValueError, OSError, KeyError):
            continue
    raise LookupError("no checkpoint is good")


def opened(data: bytes) -> dict[str, Any]:
    first, second, end = data.split(b"\n")
    algorithm, said = second.decode().split(" ")
    fields = json.loads(first)
    check(end == b"" and SUMS[algorithm](first + b"\n") == said and fields["format"] == 2)
    return dict(fields)


def verified(store: Path, path: Path) -> tuple[dict[str, Any], dict[str, bytes]]:
    index = opened(path.read_bytes())
    check(path.name == f"{index['attempt']}-{index['step']:012d}.json")
    check(sorted(rank for node in index["nodes"] for rank in node["ranks"]) == list(range(index["world"])))
    tensors = {
        name: bytearray(SIZES[tensor["dtype"]] * volume(tensor["shape"])) for name, tensor in index["tensors"].items()
    }
    seen: set[tuple[str, int]] = set()
    for node in index["nodes"]:
        data = (store / node["name"]).read_bytes()
        check(len(data) == node["size"] and SUMS[index["checksum"]](data) == node["sum"])
        manifest = opened(data)
        check(len(manifest["parts"]) == len(node["ranks"]))
        place_all(tensors, seen, store, manifest)
        index["values"].update(manifest["values"])
    for name, tensor in index["tensors"].items():
        check(len([each for each in seen if each[0] == name]) == volume(tensor["shape"]))
    return index, {name: bytes(data) for name, data in tensors.items()}


def place_all(tensors: dict[str, bytearray], seen: set[tuple[str, int]], store: Path, manifest: dict[str, Any]) -> None:
    """Verifies what one node wrote, and copies all of its shards."""
    sum_ = SUMS[manifest["checksum"]]
    parts = [(store / part["name"]).read_bytes() for part in manifest["parts"]]
    for part, data in zip(manifest["parts"], parts, strict=True):
        check(len(data) == part["size"] and sum_(data[:4096]) == part["header"])
    for name, tensor in manifest["tensors"].items():
        for shard in tensor["shards"]:
            raw = b""
            for number, offset, length, said in shard["chunks"]:
                chunk = parts[number][offset : offset + length]
                check(sum_(chunk) == said)
                raw += chunk
            places = place(tensors[name], raw, tensor["shape"], shard, SIZES[tensor["dtype"]])
            check(not seen & {(name, at) for at in places})
            seen.update((name, at) for at in places)


def place(into: bytearray, raw: bytes, shape: list[int], shard: dict[str, Any], size: int) -> list[int]:
    """Copies a shard's elements to where they belong; the numbers of these places."""
    places = []
    for number, index in enumerate(product(*map(range, shard["sizes"]))):
        at = 0
        for extent, offset, inside in zip(shape, shard["offsets"], index, strict=True):
            at = at * extent + offset + inside
        into[at * size : (at + 1) * size] = raw[number * size : (number + 1) * size]
        places.append(at)
    return places


def volume(sizes: list[int]) -> int:
    count = 1
    for size in sizes:
        count *= size
    return count


def check(holds: bool) -> None:
    if not holds:
        raise ValueError("this is not what was written")


# ---- what it reads


@pytest.mark.parametrize("checksum", ["xxh3_64", "crc32c"])
def test_a_reader_written_from_the_page_reads_what_everstep_writes(checksum: str, quick_path: Path) -> None:
    training = Training(rows=5, chunk=100, checksum=checksum)
    store = PosixStore(quick_path / "store")
    for each in (key(30), key(20, generation=2)):
        training.save(store, each)
    manifest, tensors = newest(quick_path / "store")
    state = training.state(key(20, generation=2))
    assert tensors == {name: state[name] for name in ("shared", "own")}
    assert manifest["values"]["step"] == 20
    # A later attempt that rotted is passed over, whatever the hint says.
    part = quick_path / "store" / key(20, generation=2).part_name(1)
    part.write_bytes(part.read_bytes()[:-100] + b"?" * 100)
    manifest, tensors = newest(quick_path / "store")
    assert manifest["step"] == 30
    assert tensors["shared"] == training.state(key(30))["shared"]


def test_it_reads_a_folder_of_another_program(quick_path: Path) -> None:
    (quick_path / "model").mkdir()
    (quick_path / "model" / "weights.bin").write_bytes(bytes(range(256)) * 40)
    (quick_path / "model" / "empty").write_bytes(b"")
    folder.save_folder(PosixStore(quick_path / "store"), key(7), quick_path / "model")
    manifest, tensors = newest(quick_path / "store")
    assert tensors == {"file.weights%2Ebin": bytes(range(256)) * 40, "file.empty": b""}
    files = [dict(file["dict"]) for file in dict(manifest["values"]["folder"]["dict"])["files"]]
    assert [(file["path"], file["size"]) for file in files] == [("empty", 0), ("weights.bin", 10240)]


@pytest.mark.torch
def test_it_reads_what_a_training_script_has_saved(quick_path: Path) -> None:
    torch = pytest.importorskip("torch")
    import everstep

    model = torch.nn.Linear(7, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(7)).sum().backward()
    optimizer.step()
    with everstep.checkpointer(
        quick_path / "store",
        memory=everstep.MemoryOptions(directory=quick_path / "memory"),
        times=everstep.TimeOptions(linger=1.0),
    ) as ckpt:
        ckpt.track(model=model, optimizer=optimizer, sizes={"a": (1, 2.5)})
        ckpt.save(4)
    manifest, tensors = newest(quick_path / "store")
    assert manifest["step"] == 4
    for name, tensor in model.state_dict().items():
        assert tensors[f"model.{name}"] == tensor.numpy().tobytes()
    (average,) = [name for name in tensors if name.startswith("optimizer.") and name.endswith("weight.exp_avg")]
    assert tensors[average] == optimizer.state[model.weight]["exp_avg"].numpy().tobytes()
    assert manifest["values"]["sizes.a"] == {"tuple": [1, 2.5]}


def test_the_page_names_every_tag_and_every_field() -> None:
    """The page names all that a reader must know, also tags that are added later."""
    page = (Path(__file__).parents[2] / "docs" / "reference" / "checkpoint-format.md").read_text()
    for word in words():
        assert f"`{word}`" in page, word


def words() -> Iterator[str]:
    from everstep.checkpoint.format import checksum, keys, values

    yield from checksum.ALGORITHMS
    yield from (*values._PAIRS, *values._ITEMS, "int", "float", "complex", "bytes", "pickle", "numpy.ndarray")
    yield from ("torch.dtype", "torch.device", "torch.Size", "numpy.scalar", keys.HINT)
    training, at = Training(rows=1), key()
    _, manifest = training.part(at, 0)
    from everstep.checkpoint.format.index import describe_node_manifest, encode_announcement
    from everstep.checkpoint.format.manifest import encode_manifest

    yield from json.loads(encode_manifest(manifest).split(b"\n")[0])
    index = json.loads(
        encode_announcement(describe_node_manifest(manifest, encode_manifest(manifest), 0)).split(b"\n")[0]
    )
    yield from index
    yield from index["nodes"][0]
    yield from index["tensors"]["own"]
