"""`everstep.load` and `everstep.load_into`: a checkpoint is read by anybody, beside any run, and nothing is claimed.

No process group, no writer, no attempt; the store is only read (a lease is left where it may be written). So a script
that evaluates may run in the environment of a live job, on its machine or on another.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from everstep.checkpoint.candidates import candidates, check_present, each_candidate, read_index, read_manifest
from everstep.checkpoint.casting import Cast, Casts
from everstep.checkpoint.errors import CheckpointError, Damaged, Removed, StoreError, is_damage
from everstep.checkpoint.format import Manifest
from everstep.checkpoint.keys import Key
from everstep.checkpoint.leases import ReadLease, reading
from everstep.checkpoint.loading import resharded
from everstep.checkpoint.restore import NoGoodCheckpoint, Restored
from everstep.checkpoint.selection import Only, Rename, is_meant, is_wanted, rename_leaves, rename_manifest, select_keys
from everstep.checkpoint.state import names
from everstep.checkpoint.state.flat import RANK, bind
from everstep.checkpoint.state.kinds import WHOLE, Absent, Kind, Saved, StateMismatch, with_bytes
from everstep.checkpoint.state.plain import Value
from everstep.checkpoint.store.base import Store, open_store
from everstep.checkpoint.tensor_reader import TensorReader
from everstep.checkpoint.user_metadata import VALUE, read_metadata
from everstep.checkpoint.values import unpack

_log = logging.getLogger("everstep.checkpoint")

_ODD = re.compile(r"(?:^|\.)[#\[(]")
_EXTRA = re.compile(r"(?:^|\.)_extra_state(?:\.|$)")

T = TypeVar("T")


class LoadedCheckpoint(dict[str, Any]):
    """The state of each object by its name, with what the checkpoint is: `key`, `step`, `metadata`, `created`.

    `fell_back`: newer checkpoints that are bad, with the reason.
    """

    def __init__(self, objects: Mapping[str, Any], manifest: Manifest, fell_back: Mapping[str, str]) -> None:
        super().__init__(objects)
        self.key = manifest.key
        self.step = manifest.key.step
        self.created = manifest.created
        self.metadata = read_metadata(manifest.values)
        self.fell_back = dict(fell_back)


def load(
    uri: str | os.PathLike[str],
    *,
    step: int | Key | None = None,
    only: Only | None = None,
    map_location: str | torch.device | None = None,
    rename: Rename | None = None,
    cast: Cast = None,
    allow_pickle: bool = False,
    threads: int = 4,
    options: Mapping[str, Any] | None = None,
) -> LoadedCheckpoint:
    """Read a checkpoint as state dictionaries, without a process group, beside any run.

    A module's state is flat, as its state_dict() is, whatever number of ranks has saved it; an optimizer's has its
    parameters by name, as torch.distributed.checkpoint.state_dict gives it; anything else is as its own state_dict()
    was. What was each rank's own is under "rank", by its number. Everything that is read is verified. Takes the memory
    of what is returned, and a few chunks of 8 MiB.

    Args:
        uri: A folder or a URL, as given to everstep.checkpointer(). It may be one that can only be read.
        step: Exactly this step, of the greatest attempt that has it and is good; or a key, as best() returns. By
            default the newest that is good.
        only: A glob or several, of full names: "model.*". Nothing else is read.
        map_location: The device of the tensors, by default main memory; "meta" for names, types and shapes alone, of
            the newest whose files are all there, as large as they were written.
        rename: Prefixes of full names and what takes their place, or a function from name to name (None: left out).
        cast: A type for all floating tensors, or a mapping from saved types to others.
        allow_pickle: Unpickle values that were saved so. Only for stores that you trust.
        threads: Reads at a time.
        options: Of the store.

    Returns:
        A dictionary by the objects' names, with attributes `step`, `key`, `created`, `metadata`, `fell_back`.

    Raises:
        NoSuchStep: There is none of this step; it lists those that there are.
        NoGoodCheckpoint: There are some, and none of them is good.
        CheckpointError: There is none at all, or nothing in it is called as `only` says.
    """
    casts = Casts(cast)
    casts.result(torch.float32)  # cast=True is an error before anything is read

    def read(store: Store, manifest: Manifest, lease: ReadLease) -> dict[str, Any]:
        wanted_tensors = {name: name for name in manifest.tensors if is_wanted(name, only)}
        wanted_values = {
            name: each for name, each in manifest.values.items() if name != VALUE and is_wanted(name, only)
        }
        if only is not None and not wanted_tensors and not wanted_values:
            raise _NothingWanted(f"nothing in checkpoint {manifest.key} is called {only!r}; {_tops(manifest)}")
        if map_location is not None and torch.device(map_location).type == "meta":
            # Not a byte is read; but what lacks a file is no checkpoint to tell shapes of.
            check_present(store, manifest.key, read_index(store, manifest.key).nodes)
        leaves: dict[str, Any] = {}
        with TensorReader(store, manifest, threads=threads) as reader:
            for name in wanted_tensors:
                lease.renew()
                leaves[name] = _tensor(reader, manifest, name, map_location, casts)
        for name, packed in wanted_values.items():
            value = unpack(packed, name, allow_pickle=allow_pickle)
            leaves[name] = with_bytes(value, leaves[name]) if name in leaves else value
        return _objects(rename_leaves(leaves, rename))

    objects, manifest, bad = _first_good(uri, options, step, read)
    return LoadedCheckpoint(objects, manifest, bad)


def load_into(
    uri: str | os.PathLike[str],
    *,
    step: int | Key | None = None,
    strict: bool = True,
    rename: Rename | None = None,
    cast: Cast = None,
    allow_pickle: bool = False,
    threads: int = 4,
    options: Mapping[str, Any] | None = None,
    **objects: object,
) -> Restored:
    """Read a checkpoint into objects, without a process group, beside any run: everstep.load_into(uri, model=model).

    The bytes go into the objects' own memory, so no second copy of a model is made, and of a sharded one only this
    rank's pieces are read. They are verified first and read again: where the second read fails, the error says that the
    objects are undefined. Ranks that call it do not agree on anything: give them the same `step`.

    Args:
        uri: A folder or a URL, as given to everstep.checkpointer(). It may be one that can only be read.
        step: Exactly this step, or a key; by default the newest that is good.
        strict: False: names that are only here or only in the checkpoint are reported in the result, not raised.
        rename: Prefixes of the checkpoint's full names and what takes their place, or a function (None: left out).
        cast: True: tensors get the type that the object has; or a type, or a mapping from saved types, that allow only
            these.
        allow_pickle: Unpickle values that were saved so. Only for stores that you trust.
        threads: Reads at a time.
        options: Of the store.
        **objects: By the names that they were saved under; modules, optimizers, anything with load_state_dict.

    Returns:
        As restore(): `missing` and `unexpected` name what did not meet.

    Raises:
        NoSuchStep: There is none of this step; it lists those that there are.
        NoGoodCheckpoint: There are some, and none of them is good; the objects are untouched.
        StateMismatch: It is not of these objects; they are untouched.
    """
    if not objects:
        raise CheckpointError("load_into what? Name the objects as they were saved: load_into(uri, model=model)")
    began = time.monotonic()
    count = 0

    def read(store: Store, manifest: Manifest, lease: ReadLease) -> Restored:
        nonlocal count
        renamed = rename_manifest(manifest, rename)
        filling = _Filling(renamed, objects, Casts(cast), allow_pickle=allow_pickle, strict=strict)
        with TensorReader(store, renamed, threads=threads) as reader:
            for chunks in filling.chunks(reader):
                lease.renew()
                reader.verify(chunks)
                count += sum(chunk.length for chunk in chunks)
            try:
                values = filling.fill(reader, lease.renew)
            except (Damaged, StoreError) as error:
                raise CheckpointError(
                    f"checkpoint {manifest.key} was verified, and could not be read again ({error}): the objects are "
                    "undefined now; make them anew and load again"
                ) from error
        return Restored(
            manifest.key.step,
            manifest.key,
            "store",
            values=values,
            left=tuple(filling.left),
            missing=tuple(filling.missing),
            unexpected=tuple(filling.unexpected),
            metadata=read_metadata(manifest.values),
        )

    restored, _, bad = _first_good(uri, options, step, read)
    return replace(restored, fell_back=bad, bytes=count, seconds=time.monotonic() - began)


class _NothingWanted(CheckpointError):
    """The checkpoint has nothing of the names that were asked for."""


def _first_good(
    uri: str | os.PathLike[str],
    options: Mapping[str, Any] | None,
    step: int | Key | None,
    read: Callable[[Store, Manifest, ReadLease], T],
) -> tuple[T, Manifest, dict[str, str]]:
    """Return what `read` makes of the first checkpoint that is good, and why others before it are not."""
    store = open_store(uri, **(options or {}))
    if step is not None:
        select_keys(candidates(store), step, store.url)
    bad: dict[str, str] = {}
    for key in each_candidate(store):
        if not is_meant(key, step):
            continue
        try:
            with reading(store, key) as lease:
                manifest = read_manifest(store, key)
                return read(store, manifest, lease), manifest, bad
        except Removed as error:
            _log.info("%s", error)
        except CheckpointError as error:
            if not is_damage(error):
                raise
            _log.warning("checkpoint %s is passed over: %s", key, error)
            bad[str(key)] = str(error)
    if bad:
        raise NoGoodCheckpoint(bad)
    raise CheckpointError(f"there are no checkpoints in {store.url}: nothing was saved there, or it is another place")


def _tops(manifest: Manifest) -> str:
    tops = sorted({name.partition(".")[0] for name in (*manifest.tensors, *manifest.values) if name != VALUE})
    return f"the objects in it are {', '.join(tops)}"


def _tensor(
    reader: TensorReader, manifest: Manifest, name: str, where: str | torch.device | None, casts: Casts
) -> torch.Tensor:
    saved = manifest.tensors[name]
    dtype = casts.result(getattr(torch, saved.dtype))
    device = torch.device("cpu" if where is None else where)
    if device.type == "meta":
        return torch.empty(saved.shape, dtype=dtype, device=device)
    return reader.read(name).to(device=device, dtype=dtype)


def _objects(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """The state of each object from the names of its leaves."""
    groups: dict[str, dict[str, Any]] = {}
    for name, leaf in leaves.items():
        first, _, rest = name.partition(".")
        groups.setdefault(first, {})[rest] = leaf
    found: dict[str, Any] = {}
    for first, below in groups.items():
        if first == RANK:
            ranks: dict[int, dict[str, Any]] = {}
            for name, leaf in below.items():
                rank, _, rest = name.partition(".")
                ranks.setdefault(int(rank), {})[rest] = leaf
            found[RANK] = {rank: _objects(each) for rank, each in sorted(ranks.items())}
        else:
            found[names.to_module(first)] = _state(below)
    return found


def _state(leaves: dict[str, Any]) -> Any:
    if any(name.startswith("param_groups.") for name in leaves) and any(name.startswith("options.") for name in leaves):
        return _optimizer(leaves)
    extra = {name for name in leaves if _EXTRA.search(name)}
    plain = leaves.keys() - extra
    if (
        plain
        and "" not in plain
        and all(isinstance(leaves[name], torch.Tensor) and not _ODD.search(name) for name in plain)
    ):
        return {names.to_module(name): leaves[name] for name in leaves if name in plain} | _extra_states(leaves, extra)
    return names.nest(leaves)


def _extra_states(leaves: Mapping[str, Any], extra: set[str]) -> dict[str, Any]:
    found: dict[str, dict[str, Any]] = {}
    for name in extra:
        head, _, rest = f"{name}.".partition("_extra_state.")
        found.setdefault(f"{head}_extra_state", {})[rest.removesuffix(".")] = leaves[name]
    return {names.to_module(name): names.nest(each) for name, each in found.items()}


def _optimizer(leaves: dict[str, Any]) -> dict[str, Any]:
    """As torch.distributed.checkpoint.state_dict.get_optimizer_state_dict gives it: parameters by their names."""
    groups: dict[str, list[str]] = {}
    state: dict[str, dict[str, Any]] = {}
    more: dict[str, Any] = {}
    params = {
        name.removeprefix("param_groups."): each for name, each in leaves.items() if name.startswith("param_groups.")
    }
    for param, digest in params.items():
        groups.setdefault(str(digest), []).append(names.to_module(param))
    for name, leaf in leaves.items():
        if name.startswith("state."):
            owner, below = name.removeprefix("state."), ""
            while owner not in params and owner:
                owner, _, last = owner.rpartition(".")
                below = names.join(last, below)
            state.setdefault(owner, {})[below] = leaf
        elif name.startswith("more."):
            more[name.removeprefix("more.")] = leaf
    options = {digest: leaves.get(f"options.{digest}", {}) for digest in groups}
    return {
        **(names.nest(more) if more else {}),
        "state": {names.to_module(param): names.nest(each) for param, each in state.items()},
        "param_groups": [{**options[digest], "params": every} for digest, every in groups.items()],
    }


@dataclass(frozen=True)
class _Box:
    """A box of a saved shard, and the tensor or the piece of one that it fills."""

    name: str
    shard: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    target: torch.Tensor


class _Filling:
    """The tensors that objects of one process take of a checkpoint. Making one touches no object; fill() does."""

    def __init__(
        self, manifest: Manifest, objects: Mapping[str, object], casts: Casts, *, allow_pickle: bool, strict: bool
    ) -> None:
        self._manifest = manifest
        self._kinds: list[tuple[Kind, Saved]] = []
        self._tensors: dict[str, torch.Tensor] = {}
        self.left: list[str] = []
        self.missing: list[str] = []
        problems: list[str] = []
        everything = Saved.of(manifest, allow_pickle=allow_pickle, casts=casts)
        exclusive: list[str] = []
        for kind in bind(objects, rank=0):
            if kind.prefix.startswith(f"{RANK}."):
                self.left.append(kind.prefix.removeprefix(f"{RANK}.0."))
                continue
            saved = everything.below(kind.prefix)
            if not saved:
                problems.append(Absent.of_object(kind.prefix))
                continue
            for name in saved.values:
                saved.value(name)
            self._tensors.update(kind.targets(saved, problems))
            self._kinds.append((kind, saved))
            if kind.exclusive:
                exclusive.append(f"{kind.prefix}.")
        self.missing = [each.name for each in problems if isinstance(each, Absent)]
        self.unexpected = [
            name for name in manifest.tensors if name.startswith(tuple(exclusive)) and name not in self._tensors
        ]
        if strict:
            problems += [f"{name} is in the checkpoint, and nothing here has it" for name in self.unexpected]
        else:
            problems = [each for each in problems if not isinstance(each, Absent)]
        if problems:
            raise StateMismatch(problems)
        self._boxes = list(self._plan())

    def _plan(self) -> Iterator[_Box]:
        spread: dict[str, torch.Tensor] = {}
        for name, target in list(self._tensors.items()):
            if target.is_meta:
                target = self._tensors[name] = torch.empty_like(target, device="cpu")
            if type(target) not in WHOLE:
                spread[name] = target
                continue
            for number, shard in enumerate(self._manifest.tensors[name].shards):
                if 0 in shard.sizes:
                    continue
                box = target.detach()
                for dim, (start, length) in enumerate(zip(shard.offsets, shard.sizes, strict=True)):
                    box = box.narrow(dim, start, length)
                yield _Box(name, number, (0,) * len(shard.sizes), shard.sizes, box)
        for item in resharded(spread, self._manifest):
            if 0 not in item.lengths:
                yield _Box(item.name, item.shard, item.offsets, item.lengths, item.target)

    def chunks(self, reader: TensorReader) -> Iterator[list[Any]]:
        """The chunks that fill() reads, tensor by tensor."""
        for box in self._boxes:
            yield list(reader.chunks_of(box.name, box.shard, box.offsets, box.sizes))

    def fill(self, reader: TensorReader, alive: Callable[[], None]) -> dict[str, Any]:
        """Bring the bytes into the objects; plain values that were given, as they are now."""
        with torch.no_grad():
            for box in self._boxes:
                alive()
                reader.read_box(box.name, box.shard, box.offsets, box.sizes, box.target)
        for kind, saved in self._kinds:
            kind.load(saved, self._tensors)
        return {kind.prefix: kind.value for kind, _ in self._kinds if isinstance(kind, Value)}
