"""Define `everstep.load` and `everstep.load_into`: anybody reads a checkpoint, beside any run, and claims nothing.

No writer, no attempt, and no process group except for what is sharded; the store is only read (a lease is left where it
may be written). So a script that evaluates may run in the environment of a live job, on its machine or on another.
"""

from __future__ import annotations

import logging
import operator
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch

from everstep.checkpoint.catalog.candidates import (
    check_present,
    check_threads,
    each_candidate,
    list_candidates,
    read_index,
    read_manifest,
)
from everstep.checkpoint.catalog.leases import ReadLease, hold_read_lease, telling_removed
from everstep.checkpoint.catalog.selection import (
    NoSuchStep,
    Only,
    Rename,
    check_wanted,
    is_meant,
    is_wanted,
    rename_leaves,
    rename_manifest,
)
from everstep.checkpoint.errors import CheckpointError, Damaged, Removed, StoreError
from everstep.checkpoint.format.descriptions import is_description, object_of
from everstep.checkpoint.format.keys import Key
from everstep.checkpoint.format.manifest import Manifest
from everstep.checkpoint.format.start_mark import NO_STATE
from everstep.checkpoint.format.user_metadata import read_metadata
from everstep.checkpoint.format.values import InPart, unpack_value
from everstep.checkpoint.load.load_ranks import LoadingRanks, find_ranks
from everstep.checkpoint.load.object_filling import ObjectFilling
from everstep.checkpoint.restore.options import RestoreOptions
from everstep.checkpoint.restore.restorer import NoGoodCheckpoint, Restored
from everstep.checkpoint.restore.steps import BadCheckpoint, UndefinedObjects
from everstep.checkpoint.restore.tensor_reader import TensorReader
from everstep.checkpoint.state.bulk import stand_in
from everstep.checkpoint.state.casting import Cast, Casts
from everstep.checkpoint.state.dictionaries import build_objects
from everstep.checkpoint.state.inference_mode import making_normal_tensors
from everstep.checkpoint.state.kinds import with_bytes
from everstep.checkpoint.state.ties import find_kept_names
from everstep.checkpoint.store.base import Store, open_store

_log = logging.getLogger("everstep.checkpoint")

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


@making_normal_tensors
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

    Each process reads by itself: ranks that must have the same give one key as `step`, else each takes what is newest
    and good for it.

    A module's state is flat, as its state_dict() is, whatever number of ranks has saved it; an optimizer's has its
    parameters by name in their order, as torch.distributed.checkpoint.state_dict gives it; anything else is as its own
    state_dict() was. What was each rank's own is under "rank", by its number. Everything that is read is verified.
    Takes the memory of what is returned, and a few chunks of 8 MiB.

    Args:
        uri: A folder or a URL, as given to everstep.checkpointer(). It may be one that can only be read.
        step: Exactly this step, of the greatest attempt that has it and is good; or a key, as best() returns. By
            default the newest that is good.
        only: A glob or several, of full names: "model.*". Nothing else is read.
        map_location: The device of the tensors, by default main memory; "meta" for names, types and shapes alone, of
            the newest whose files are all there, as large as they were written. Not a byte of them is read then: an
            array or bytes of more than 1,024 bytes are tensors on the meta device too.
        rename: Prefixes of full names and what takes their place, or a function from name to name (None: left out).
        cast: A type for all floating tensors, or a mapping from saved types to others.
        allow_pickle: Unpickle values that were saved so. Only for stores that you trust.
        threads: Reads at a time.
        options: Of the store.

    Returns:
        A dictionary by the objects' names, with attributes `step`, `key`, `created`, `metadata`, `fell_back`.

    Raises:
        TypeError: `cast` is no type of torch, or the like of it.
        NoSuchStep: There is none of this step; it lists those that there are.
        NoGoodCheckpoint: There are some, and none of them is good.
        CheckpointError: There is none at all, or nothing in it is called as `only` says.
    """
    casts = Casts(cast)
    check_threads(threads)
    check_wanted(step)
    casts.result(torch.float32)  # cast=True is an error before anything is read

    def read(source: _Source) -> dict[str, Any]:
        found: dict[str, Any] = source.run(lambda: read_all(source.store, source.manifest, source.alive))
        return found

    def read_all(store: Store, manifest: Manifest, alive: Callable[[], None]) -> dict[str, Any]:
        wanted_tensors = {name: name for name in manifest.tensors if is_wanted(name, only)}
        for name in wanted_tensors:
            casts.check(name, getattr(torch, manifest.tensors[name].dtype))
        plain = {
            name: each for name, each in manifest.values.items() if name not in NO_STATE and not is_description(name)
        }
        wanted_values = {name: each for name, each in plain.items() if is_wanted(name, only)}
        if only is not None and not wanted_tensors and not wanted_values:
            raise _NothingWanted(
                f"nothing in checkpoint {manifest.key} is called {only!r}; {_list_top_names(manifest)}"
            )
        if map_location is not None and torch.device(map_location).type == "meta":
            # Not a byte is read; but what lacks a file is no checkpoint to tell shapes of.
            check_present(store, manifest.key, read_index(store, manifest.key).nodes)
        described = _select_descriptions(manifest, (*wanted_tensors, *wanted_values))
        values = {
            name: unpack_value(packed, name, allow_pickle=allow_pickle)
            for name, packed in (wanted_values | described).items()
        }
        described = {name: values[name] for name in described}
        kept = find_kept_names(described, wanted_tensors)
        tensors: dict[str, Any] = {}
        with TensorReader(store, manifest, threads=threads) as reader:
            for name in [each for each in wanted_tensors if each not in kept]:
                alive()
                tensors[name] = _read_leaf(reader, manifest, name, values.get(name), map_location, casts)
        leaves = {name: tensors[kept.get(name, name)] for name in wanted_tensors}
        leaves.update({name: value for name, value in values.items() if name not in leaves})
        try:
            return build_objects(rename_leaves(leaves, rename))
        except ValueError as error:
            if only is None:
                raise
            raise CheckpointError(
                f"only={only!r} takes a part of what is whole or left out, as a list: {error}; name all of it"
            ) from error

    objects, manifest, bad = _first_good(uri, options, step, read, LoadingRanks())
    return LoadedCheckpoint(objects, manifest, bad)


@making_normal_tensors
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
    """Read a checkpoint into objects, beside any run: everstep.load_into(uri, model=model). It needs no process group.

    The bytes go into the objects' own memory, so no second copy of a model is made, and of a sharded one only this
    rank's pieces are read. They are verified first and read again: where the second read fails, the error says that the
    objects are undefined.

    Where an object is sharded (a DTensor is in it), all ranks of its mesh call this together, and all take the same
    checkpoint: one that is bad for any of them is passed over by all. A mesh that is cut out of another stands for that
    one. Whatever is not sharded, a replica under DDP or a stage of a pipeline without DTensors, each rank loads by
    itself, and may fall back by itself: give all of them one key as `step`, as that of the rank which loads first. A
    stage needs strict=False, since the tensors of the others are only in the checkpoint.

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
        RestoreFailed: It was verified, and could not be read again: the objects are undefined.
        RankLost: A rank of the mesh has died or has not called this: for up to 300 s is waited for its sign of life.
        CheckpointError: Another rank of the mesh failed, which is named, or they were given different arguments.
    """
    if not objects:
        raise CheckpointError("load_into() got no objects: name them as they were saved, load_into(uri, model=model)")
    casts = Casts(cast)
    check_threads(threads)
    check_wanted(step)
    began = time.monotonic()
    count = 0

    ranks = LoadingRanks(find_ranks(objects))

    def read(source: _Source) -> Restored:
        nonlocal count
        manifest = source.manifest

        def prepare() -> tuple[Manifest, ObjectFilling]:
            renamed = rename_manifest(manifest, rename)
            return renamed, ObjectFilling(renamed, objects, casts, allow_pickle=allow_pickle, strict=strict)

        prepared: tuple[Manifest, ObjectFilling] = source.run(prepare)
        renamed, filling = prepared
        with TensorReader(source.store, renamed, threads=threads, on_bytes=lambda _: source.alive()) as reader:

            def verify() -> None:
                nonlocal count
                for chunks in filling.chunks(reader):
                    reader.verify(chunks)
                    count += sum(chunk.length for chunk in chunks)

            def fill() -> dict[str, Any]:
                try:
                    return filling.fill(reader, source.alive)
                except (Damaged, StoreError) as error:
                    raise UndefinedObjects(str(error)) from error

            source.run(verify)
            values: dict[str, Any] = source.run(fill)
        return Restored(
            manifest.key.step,
            manifest.key,
            "store",
            values=values,
            not_restored=tuple(filling.not_restored),
            kept=tuple(filling.kept),
            missing=tuple(filling.missing),
            unexpected=tuple(filling.unexpected),
            metadata=read_metadata(manifest.values),
        )

    try:
        wanted = step if step is None or isinstance(step, Key) else operator.index(step)
        ranks.check_options(RestoreOptions(wanted, strict, rename, casts, allow_pickle))
        restored, _, bad = _first_good(uri, options, step, read, ranks)
    finally:
        ranks.close()
    return replace(restored, fell_back=bad, bytes=count, seconds=time.monotonic() - began)


class _NothingWanted(CheckpointError):
    """The checkpoint has nothing of the names that were asked for."""


@dataclass(frozen=True)
class _Source:
    """A checkpoint that is read. `run`: does a share of the work, which succeeds or fails on all ranks that load
    together. `alive`: to be called while that lasts, from any thread."""

    store: Store
    manifest: Manifest
    run: Callable[[Callable[[], Any]], Any]
    alive: Callable[[], None]


def _first_good(
    uri: str | os.PathLike[str],
    options: Mapping[str, Any] | None,
    step: int | Key | None,
    read: Callable[[_Source], T],
    ranks: LoadingRanks,
) -> tuple[T, Manifest, dict[str, str]]:
    """Return what `read` makes of the first checkpoint that is good for all ranks, and why others before it are not."""
    store = ranks.run(lambda: open_store(uri, **(options or {})))
    if step is not None:
        steps = ranks.ask_first(lambda: _list_others(store, step))
        if steps is not None:
            raise NoSuchStep(store.url, step.step if isinstance(step, Key) else step, steps)
    bad: dict[str, str] = {}
    removed: Removed | None = None
    tried = (each for each in each_candidate(store) if is_meant(each, step))
    while (found := ranks.ask_first(lambda: next(map(str, tried), None))) is not None:
        key = Key.parse(found)
        try:
            with hold_read_lease(store, key) as lease:
                run = _run_while_there(store, key, ranks)
                manifest: Manifest = run(partial(read_manifest, store, key))
                return read(_Source(store, manifest, run, _make_life_signs(lease, ranks))), manifest, bad
        except Removed as error:
            removed = error
        except BadCheckpoint as error:
            why = error if ranks.are_several else error.__cause__
            _log.warning("checkpoint %s is passed over: %s", key, why)
            bad[str(key)] = str(why)
    if bad:
        raise NoGoodCheckpoint(bad)
    if removed is not None:
        raise removed
    raise CheckpointError(f"there are no checkpoints in {store.url}: nothing was saved there, or the URL is wrong")


def _list_others(store: Store, step: int | Key) -> list[int] | None:
    """Return the steps that there are, where none is the wanted one; else None."""
    keys = list_candidates(store)
    return None if any(is_meant(key, step) for key in keys) else sorted({key.step for key in keys})


def _run_while_there(store: Store, key: Key, ranks: LoadingRanks) -> Callable[[Callable[[], Any]], Any]:
    def run(work: Callable[[], Any]) -> Any:
        def checked() -> Any:
            with telling_removed(store, key):
                return work()

        return ranks.run(checked)

    return run


def _make_life_signs(lease: ReadLease, ranks: LoadingRanks) -> Callable[[], None]:
    def alive() -> None:
        lease.renew()
        ranks.give_sign()

    return alive


def _list_top_names(manifest: Manifest) -> str:
    tops = sorted({name.partition(".")[0] for name in (*manifest.tensors, *manifest.values) if name not in NO_STATE})
    return f"the objects in it are {', '.join(tops)}"


def _select_descriptions(manifest: Manifest, wanted: Iterable[str]) -> dict[str, object]:
    """Return the packed descriptions of the objects of which something is wanted, by name."""
    objects = set(map(object_of, wanted))
    return {name: each for name, each in manifest.values.items() if is_description(name) and object_of(name) in objects}


def _read_leaf(
    reader: TensorReader,
    manifest: Manifest,
    name: str,
    value: Any,
    where: str | torch.device | None,
    casts: Casts,
) -> Any:
    """Return the tensor of this name, where it is wanted; or the value that has its bytes there, which is no tensor."""
    saved = manifest.tensors[name]
    dtype = getattr(torch, saved.dtype)
    device = torch.device("cpu" if where is None else where)
    if device.type == "meta":
        if isinstance(value, InPart):
            return stand_in(torch.empty(saved.shape, dtype=dtype, device=device), value)
        return with_bytes(value, torch.empty(saved.shape, dtype=casts.result(dtype), device=device))
    if value is not None:
        return with_bytes(value, reader.read(name))
    return reader.read(name).to(device=device, dtype=casts.result(dtype))
