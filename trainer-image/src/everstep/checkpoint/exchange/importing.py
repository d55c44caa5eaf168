"""Checkpoints of other libraries become checkpoints in a store, which restore() and load() take as any other."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, cast

import torch

from everstep.checkpoint.catalog.selection import Only, Rename, is_wanted, rename_leaves
from everstep.checkpoint.errors import CheckpointError
from everstep.checkpoint.exchange.exporting import FORMAT_KEY, explain_foreign
from everstep.checkpoint.exchange.renames import warn_of_unused_renames
from everstep.checkpoint.exchange.state_dicts import (
    OptimizerOrder,
    check_object_name,
    find_number_keys,
    leave_out_unwanted,
    name_leaves,
    split_objects,
)
from everstep.checkpoint.format.descriptions import KIND, is_description, object_of
from everstep.checkpoint.format.manifest import CHUNK, Key, get_itemsize
from everstep.checkpoint.format.user_metadata import pack_metadata
from everstep.checkpoint.format.values import pack_value
from everstep.checkpoint.publish import attempts
from everstep.checkpoint.publish.publication import WholeTensor, write_checkpoint
from everstep.checkpoint.save.plan_coordinator import fingerprint_model
from everstep.checkpoint.state import names
from everstep.checkpoint.state.kinds import dtype_name
from everstep.checkpoint.state.memory import view_bytes
from everstep.checkpoint.state.structure import MODULE, describe_structure
from everstep.checkpoint.state.ties import describe_ties
from everstep.checkpoint.store.base import open_store

_log = logging.getLogger("everstep.checkpoint")


def import_torch(
    path: str | os.PathLike[str],
    uri: str | os.PathLike[str],
    *,
    step: int = 0,
    name: str = "model",
    only: Only | None = None,
    rename: Rename | None = None,
    optimizer_order: OptimizerOrder | None = None,
    metadata: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
) -> Key:
    """Import a file of torch.save(), read with `weights_only=True`: a state dictionary, or a dictionary of several.

    Args:
        path: The file.
        uri: The store: a folder or a URL, as given to everstep.checkpointer(). Nothing else may be saving into it.
        step: The number of trained steps that it stands for.
        name: What the object is called if the file is one state dictionary, or has one under `state_dict`.
        only: A glob or several of full names, as "model.*"; the rest is left out.
        rename: Prefixes of full names and what takes their place, or a function (None: left out).
        optimizer_order: Names of the parameters in the order in which the optimizer was given them, group after group;
            by the optimizer's name where there are several. Only for one that was saved without names.
        metadata: A JSON object that is kept with it; see save().
        options: Of the store.

    Returns:
        The key of the checkpoint: the newest of the store, since it is that of a new attempt.

    Raises:
        CheckpointError: The file is none of torch.save(), or holds what cannot be imported: also an optimizer whose
            parameters have numbers, where nobody can tell which they are.
    """
    if Path(path).is_dir():
        raise CheckpointError(f"{path} is a folder, and torch.save() writes a file: name the file, or import it as dcp")
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=_can_map(path))
    except (OSError, MemoryError):
        raise
    except Exception as error:  # whatever unpickling says to a file that is something else
        raise CheckpointError(f"{path} cannot be read with weights_only=True: {error}") from error
    leaves = name_leaves(leave_out_unwanted(split_objects(loaded, name), only), optimizer_order)
    return _import_leaves(leaves, uri, step, only, rename, metadata, options)


def import_dcp(
    folder: str | os.PathLike[str],
    uri: str | os.PathLike[str],
    *,
    step: int = 0,
    name: str = "model",
    only: Only | None = None,
    rename: Rename | None = None,
    optimizer_order: OptimizerOrder | None = None,
    metadata: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
) -> Key:
    """Import a folder of torch.distributed.checkpoint, whatever number of ranks has saved it, in this process alone.

    DCP's own files are pickles: import only folders that you trust. Takes the memory of all that the folder holds.
    Arguments, result and errors as import_torch().
    """
    from torch.distributed.checkpoint import CheckpointException, FileSystemReader
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    if not (Path(folder) / ".metadata").is_file():
        raise CheckpointError(f"{folder} is no folder of torch.distributed.checkpoint: it has no file .metadata")
    loaded: dict[str, Any] = {}
    try:
        _load_state_dict(loaded, FileSystemReader(folder), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    except CheckpointException as error:
        raise CheckpointError(f"{folder} cannot be read by DCP: {explain_foreign(error)}") from error
    objects = leave_out_unwanted(split_objects(loaded, name), only)
    for where, keys in find_number_keys(objects).items():
        _log.warning(
            "%s has the keys %s: DCP makes text of numbers, and an object may not find them so, as a MultiStepLR its "
            "milestones; set them anew after restore(), or leave the object out with only= or rename=",
            where,
            ", ".join(map(repr, keys[:8])),
        )
    leaves = name_leaves(objects, optimizer_order)
    return _import_leaves(leaves, uri, step, only, rename, metadata, options)


def import_safetensors(
    path: str | os.PathLike[str],
    uri: str | os.PathLike[str],
    *,
    step: int = 0,
    name: str = "model",
    only: Only | None = None,
    rename: Rename | None = None,
    metadata: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
) -> Key:
    """Import a file of safetensors, or a folder of them as Hugging Face writes it, as one object's tensors.

    Takes the memory of one tensor. Arguments, result and errors as import_torch().
    """
    from safetensors import SafetensorError, safe_open

    check_object_name(name)
    found = Path(path)
    files = sorted(found.glob("*.safetensors")) if found.is_dir() else [found]
    if not files:
        raise CheckpointError(f"{path} has no file *.safetensors")
    if found.is_dir():
        _check_indexes(found, files)
    leaves: dict[str, Any] = {names.join_segments(names.escape_segment(name), KIND): describe_structure(MODULE)}
    said: dict[str, str] = {}
    for file in files:
        try:
            reader = safe_open(file, framework="pt")
        except SafetensorError as error:
            raise CheckpointError(f"{file} is no file of safetensors: {error}") from error
        with reader as opened:
            for key in opened.keys():  # noqa: SIM118 - it is no mapping
                full = names.join_segments(names.escape_segment(name), names.of_module(key))
                if full in leaves:
                    raise CheckpointError(f"{key} is in two files of {path}: give one file, or remove those left over")
                leaves[full] = _Lazy(file, key, opened.get_slice(key))
            said |= opened.metadata() or {}
    tied: dict[str, list[str]] = {}
    for alias, kept in said.items():  # other names of tied tensors among them, as safetensors' save_model() says these
        full, first = (names.join_segments(names.escape_segment(name), names.of_module(each)) for each in (alias, kept))
        if alias != FORMAT_KEY and first in leaves and full not in leaves:
            tied.setdefault(first, [first]).append(full)
    leaves.update({alias: leaves[first] for first, (_, *aliases) in tied.items() for alias in aliases})
    leaves.update(describe_ties(tied.values()))
    return _import_leaves(leaves, uri, step, only, rename, metadata, options)


def _check_indexes(folder: Path, files: list[Path]) -> None:
    """See that all files are there of which an index names some that are: a download may have ended in the middle."""
    there = {each.name for each in files}
    for index in folder.glob("*.safetensors.index.json"):
        try:
            named = set(json.loads(index.read_bytes())["weight_map"].values())
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CheckpointError(f"{index} is no index of files of safetensors: {error!r}") from error
        if named & there and (absent := sorted(named - there)):
            raise CheckpointError(
                f"{folder} does not have {', '.join(absent[:8])}, which {index.name} names: complete the download or "
                "the copy of this folder first"
            )


def _choose_leaves(leaves: Mapping[str, Any], only: Only | None) -> dict[str, Any]:
    """Return the wanted part, with the descriptions of the objects that it belongs to."""
    found = {name: leaf for name, leaf in leaves.items() if not is_description(name) and is_wanted(name, only)}
    objects = set(map(object_of, found))
    described = {name: leaf for name, leaf in leaves.items() if is_description(name) and object_of(name) in objects}
    return found | described


class _Lazy:
    """A tensor of a file that is read when it is written."""

    def __init__(self, file: Path, key: str, piece: Any) -> None:
        from safetensors import safe_open

        self.shape = tuple(piece.get_shape())
        self._file, self._key = file, key
        if 0 in self.shape or not self.shape:
            with safe_open(file, framework="pt") as opened:
                self.dtype = opened.get_tensor(key).dtype
        else:
            self.dtype = piece[tuple(slice(0, 1) for _ in self.shape)].dtype

    def read(self) -> torch.Tensor:
        from safetensors import safe_open

        with safe_open(self._file, framework="pt") as opened:
            found: torch.Tensor = opened.get_tensor(self._key)
            return found


def _import_leaves(
    leaves: Mapping[str, Any],
    uri: str | os.PathLike[str],
    step: int,
    only: Only | None,
    rename: Rename | None,
    metadata: Mapping[str, Any] | None,
    options: Mapping[str, Any] | None,
) -> Key:
    chosen = _choose_leaves(leaves, only)
    warn_of_unused_renames(rename, [name for name in chosen if not is_description(name)])
    wanted = rename_leaves(chosen, rename)
    tensors = {name: leaf for name, leaf in wanted.items() if isinstance(leaf, torch.Tensor | _Lazy)}
    values = {name: pack_value(leaf, name) for name, leaf in wanted.items() if name not in tensors}
    if not tensors and not values:
        raise CheckpointError(f"nothing is left to import with only={only!r}")
    values.update(pack_metadata(metadata or {}))
    written = {name: _make_whole_tensor(name, tensor) for name, tensor in sorted(tensors.items())}
    model = fingerprint_model({name: (each.dtype, each.shape) for name, each in written.items()})
    store = open_store(uri, **(options or {}))
    key = Key(attempts.claim_next_attempt(store), step)
    write_checkpoint(store, key, written, dict(sorted(values.items())), model=model)
    return key


def _make_whole_tensor(name: str, tensor: torch.Tensor | _Lazy) -> WholeTensor:
    """Return a tensor as it is written. CheckpointError when a checkpoint cannot hold it."""
    dtype, shape = dtype_name(tensor.dtype), tuple(tensor.shape)
    if isinstance(tensor, torch.Tensor) and tensor.is_meta:
        raise CheckpointError(f"{name} is on the meta device and has no elements: leave it out with only= or rename=")
    if isinstance(tensor, torch.Tensor) and (tensor.layout is not torch.strided or tensor.is_quantized):
        kind = "quantized" if tensor.is_quantized else str(tensor.layout).removeprefix("torch.")
        raise CheckpointError(
            f"{name} is a {kind} tensor of {dtype}, and a checkpoint holds dense ones: make it dense (to_dense(), "
            "dequantize()) before it is saved, or leave it out with only= or rename="
        )
    try:
        size = prod(shape) * get_itemsize(dtype)
    except ValueError as error:
        raise CheckpointError(
            f"{name} has the type {dtype}, which a checkpoint does not hold: convert it before it is saved, or leave "
            "it out with only= or rename="
        ) from error
    return WholeTensor(dtype, shape, size, partial(_iterate_tensor_bytes, tensor))


def _iterate_tensor_bytes(tensor: torch.Tensor | _Lazy) -> Iterator[memoryview]:
    whole = tensor.read() if isinstance(tensor, _Lazy) else tensor
    plain = whole.detach().cpu().resolve_conj().resolve_neg().contiguous()
    data = memoryview(cast("Any", view_bytes(plain).numpy()))
    for start in range(0, len(data), CHUNK):
        yield data[start : start + CHUNK]


def _can_map(path: str | os.PathLike[str]) -> bool:
    import zipfile

    return zipfile.is_zipfile(path)
