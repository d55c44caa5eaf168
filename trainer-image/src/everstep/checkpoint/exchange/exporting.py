"""Checkpoints of a store in other libraries' files, which those libraries read themselves."""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from glob import escape
from math import prod
from pathlib import Path
from typing import Any

import torch

from everstep.checkpoint.catalog.candidates import each_candidate, is_committed, list_candidates, read_index
from everstep.checkpoint.catalog.leases import ReadLease, hold_read_lease
from everstep.checkpoint.catalog.selection import NoSuchStep, Only, Rename, is_meant, rename_leaves, select_keys
from everstep.checkpoint.errors import CheckpointError, Removed
from everstep.checkpoint.exchange.renames import warn_of_unused_renames
from everstep.checkpoint.format.descriptions import is_description
from everstep.checkpoint.format.keys import Key
from everstep.checkpoint.format.manifest import get_itemsize
from everstep.checkpoint.format.values import unpack_value
from everstep.checkpoint.load.api import LoadedCheckpoint, load
from everstep.checkpoint.restore.restorer import NoGoodCheckpoint
from everstep.checkpoint.state import names
from everstep.checkpoint.state.casting import Cast, can_convert
from everstep.checkpoint.state.kinds import dtype_name
from everstep.checkpoint.state.module_metadata import read_unusual
from everstep.checkpoint.state.ties import find_kept_names
from everstep.checkpoint.store.base import open_store
from everstep.checkpoint.store.overlap import check_leaves_store

_log = logging.getLogger("everstep.checkpoint")

FORMAT_KEY = "format"  # of the metadata of a file of safetensors: for which library it is. All others are aliases here
SHARD_BYTES = 5 * 10**9  # as large a file as transformers wrote for years, and as many tools expect

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kMGT]?)B?", re.ASCII)
_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def export_safetensors(
    uri: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    step: int | Key | None = None,
    name: str = "model",
    rename: Rename | None = None,
    cast: Cast = None,
    max_shard_bytes: int = SHARD_BYTES,
    config: str | os.PathLike[str] | None = None,
    replace: bool = False,
    options: Mapping[str, Any] | None = None,
) -> Key:
    """Write the tensors of one object as safetensors: one file, or a folder as Hugging Face's from_pretrained() reads.

    A folder has `model.safetensors`; above `max_shard_bytes`, `model-00001-of-00003.safetensors` … with
    `model.safetensors.index.json`. It is there whole or not at all. Takes the memory of one file. A tied tensor is
    written once, under the first of its names in the model; the metadata of its file names the others, as
    safetensors.torch.save_model() has it.

    Args:
        uri: The store: a folder or a URL, as given to everstep.checkpointer().
        target: A file that ends with `.safetensors`, or the folder.
        step: Exactly this step, or a key; by default the newest that is good.
        name: The object, a module.
        rename: Prefixes of the names within the object and what takes their place, or a function (None: left out).
        cast: A type for all floating tensors, or a mapping from saved types to others.
        max_shard_bytes: Of a file in a folder; a tensor that is larger has a file of its own.
        config: A `config.json` that is copied into the folder.
        replace: Put it in the place of what is there.
        options: Of the store.

    Returns:
        The key of what was exported.

    Raises:
        CheckpointError: The object is not in the checkpoint, or the target is there already, or holds the store, or
            cannot be written.
        NoSuchStep, NoGoodCheckpoint: As load().
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    path = Path(target)
    is_file = path.suffix == ".safetensors"
    check_leaves_store(path, open_store(uri, **(options or {})))
    if is_file and config is not None:
        raise CheckpointError(f"{path} is a file: a config.json belongs into a folder; give a folder as the target")

    def write(key: Key, lease: ReadLease) -> None:
        plan = _plan_files(uri, key, name, rename, cast, None if is_file else max_shard_bytes, options)
        with _replace_target(path, replace, SafetensorError) as place:
            if not is_file:
                place.mkdir()
            for file, tensors in plan.read_files():
                lease.renew()
                metadata = {FORMAT_KEY: "pt", **plan.aliases_of(file)}
                written = place if is_file else place / file
                written.touch()  # with the mode of the user's other new files, which safetensors' own way does not keep
                mode = written.stat().st_mode
                save_file(tensors, written, metadata=metadata)
                written.chmod(mode)
            if len(plan.files) > 1:
                (place / "model.safetensors.index.json").write_text(plan.index())
            if config is not None:
                shutil.copyfile(config, place / "config.json")

    return _write_first_good(uri, options, step, write)


@dataclass(frozen=True)
class _Files:
    """The files of an export: the new names of each, `called` the saved ones, `sizes` in bytes. `kept`: other names of
    tensors that are tied, and the name under which each is written."""

    files: dict[str, list[str]]
    called: Mapping[str, str]
    kept: Mapping[str, str]
    sizes: Mapping[str, int]
    read: Callable[[list[str]], dict[str, torch.Tensor]]

    def read_files(self) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
        """Yield each file's name and its tensors by their new names."""
        for file, new_names in self.files.items():
            saved = self.read([self.called[new] for new in new_names]) if new_names else {}
            yield file, _separate({new: saved[self.called[new]].contiguous() for new in new_names})

    def aliases_of(self, file: str) -> dict[str, str]:
        """Return other names of tied tensors in a file, and the name that each has there."""
        return {alias: name for alias, name in self.kept.items() if name in self.files[file]}

    def index(self) -> str:
        """Return the index of several files, as transformers writes it."""
        weights = {new: file for file, new_names in self.files.items() for new in new_names}
        found = {"metadata": {"total_size": sum(self.sizes.values())}, "weight_map": dict(sorted(weights.items()))}
        return json.dumps(found, indent=2) + "\n"


def _separate(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors each in its own memory: safetensors writes no two that share theirs."""
    seen: set[int] = set()
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        place = tensor.untyped_storage().data_ptr()
        found[name] = tensor.clone() if place in seen else tensor
        seen.add(place)
    return found


def _plan_files(
    uri: str | os.PathLike[str],
    key: Key,
    name: str,
    rename: Rename | None,
    cast: Cast,
    limit: int | None,
    options: Mapping[str, Any] | None,
) -> _Files:
    """Return which tensors of a checkpoint go into which file, all into one where there is no limit in bytes."""
    loaded = load(uri, step=key, only=name, map_location="meta", cast=cast, options=options)
    index = read_index(open_store(uri, **(options or {})), key)
    tensors = _collect_tensors(loaded, name, arrays=index.values.keys() & index.tensors.keys())
    full_names = {each: _find_full_name(name, each, index.tensors) for each in tensors}
    warn_of_unused_renames(rename, tensors)
    every = rename_leaves({each: each for each in tensors}, rename)
    kept = _find_kept(
        {full_names[old]: new for new, old in every.items()},
        {name: unpack_value(each, name) for name, each in index.values.items() if is_description(name)},
    )
    called = {new: old for new, old in every.items() if new not in kept}
    _check_types({new: tensors[old] for new, old in called.items()})
    sizes = {new: _count_bytes(tensors[old]) for new, old in called.items()}
    cut = [list(called)] if limit is None else _split_by_size(sizes, limit)
    names_ = [f"model-{number:05d}-of-{len(cut):05d}.safetensors" for number in range(1, len(cut) + 1)]
    files = dict(zip(names_ if len(cut) > 1 else ["model.safetensors"], cut, strict=True))

    def read(saved_names: list[str]) -> dict[str, torch.Tensor]:
        wanted = [escape(full_names[each]) for each in saved_names]
        return _collect_tensors(load(uri, step=key, only=wanted, cast=cast, options=options), name)

    return _Files(files, called, kept, sizes, read)


def _find_kept(new_names: Mapping[str, str], descriptions: Mapping[str, Any]) -> dict[str, str]:
    """Return the new names of tied tensors that are not written, each with the one that is.

    Args:
        new_names: By full names.
        descriptions: Of the checkpoint, by full names too.
    """
    kept = find_kept_names(descriptions, new_names)
    return {new_names[alias]: new_names[first] for alias, first in kept.items() if new_names[alias] != FORMAT_KEY}


def _check_types(tensors: Mapping[str, torch.Tensor]) -> None:
    """CheckpointError when safetensors, as it is installed here, cannot hold one of these."""
    import safetensors.torch

    def can_hold(dtype: torch.dtype) -> bool:
        try:
            data = safetensors.torch.save({"x": torch.empty(0, dtype=dtype, device="cpu")})
            return safetensors.torch.load(data)["x"].dtype is dtype
        except Exception:  # whatever it says to a type that it does not know
            return False

    known: dict[torch.dtype, bool] = {}
    for name, tensor in tensors.items():
        if not known.setdefault(tensor.dtype, can_hold(tensor.dtype)):
            cast = ", convert it with cast=" if can_convert(tensor.dtype, torch.bfloat16) else ""
            raise CheckpointError(
                f"{name} has the type {dtype_name(tensor.dtype)}, which safetensors does not hold: leave it out with "
                f"rename= (a function that returns None for it){cast}, or export to DCP"
            )


def _write_first_good(
    uri: str | os.PathLike[str],
    options: Mapping[str, Any] | None,
    step: int | Key | None,
    write: Callable[[Key, ReadLease], None],
) -> Key:
    """Return the first checkpoint of which all is good that `write` reads; it is held while that reads it."""
    store = open_store(uri, **(options or {}))
    bad: dict[str, str] = {}
    removed: Key | None = None
    if step is not None:
        select_keys(list_candidates(store), step, store.url)
    for key in each_candidate(store):
        if not is_meant(key, step):
            continue
        with hold_read_lease(store, key) as lease:
            try:
                write(key, lease)
            except (NoGoodCheckpoint, NoSuchStep, Removed) as error:
                if not is_committed(store, key):
                    removed = key
                    continue
                _log.warning("checkpoint %s is passed over: %s", key, error)
                bad[str(key)] = getattr(error, "reasons", {}).get(str(key), str(error))
            else:
                return key
    if bad:
        raise NoGoodCheckpoint(bad)
    if removed is not None:
        raise Removed(removed.manifest_name)
    raise CheckpointError(f"there are no checkpoints in {store.url}: nothing was saved there, or the URL is wrong")


def export_dcp(
    uri: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    step: int | Key | None = None,
    only: Only | None = None,
    rename: Rename | None = None,
    cast: Cast = None,
    replace: bool = False,
    options: Mapping[str, Any] | None = None,
) -> Key:
    """Write a checkpoint as a folder that torch.distributed.checkpoint loads, onto any number of ranks.

    Its state dictionary is {object: state}, where a module's and an optimizer's are those of
    torch.distributed.checkpoint.state_dict. Each rank's own state is left out. Takes the memory of what is exported.
    A warning names what DCP does not hold as it is: keys that are no text, empty dictionaries, dictionaries of other
    types.

    Args:
        uri: The store: a folder or a URL, as given to everstep.checkpointer().
        folder: Where it is to be.
        step: Exactly this step, or a key; by default the newest that is good.
        only: A glob or several of full names: "model.*".
        rename: Prefixes of full names and what takes their place, or a function (None: left out).
        cast: A type for all floating tensors, or a mapping from saved types to others.
        replace: Put it in the place of what is there.
        options: Of the store.

    Returns:
        The key of what was exported.

    Raises:
        CheckpointError: The folder is there already, holds the store or cannot be written, or two keys of a dictionary
            are one text.
        NoSuchStep, NoGoodCheckpoint: As load().
    """
    import torch.distributed.checkpoint as dcp

    path = Path(folder)
    check_leaves_store(path, open_store(uri, **(options or {})))
    loaded = load(uri, step=step, only=only, rename=rename, cast=cast, options=options)
    state = {name: each for name, each in loaded.items() if name != "rank"}
    if changed := list(_changed_by_dcp("", state)):
        more = f" and {len(changed) - 8} more" if len(changed) > 8 else ""
        _log.warning("DCP gives back otherwise than it was saved: %s%s", "; ".join(changed[:8]), more)
    with _replace_target(path, replace, dcp.CheckpointException) as place:
        dcp.save(state, storage_writer=dcp.FileSystemWriter(place), no_dist=True)
    return loaded.key


def _changed_by_dcp(name: str, value: object) -> Iterator[str]:
    """Yield what of a nested state comes back from DCP as something else; CheckpointError where it cannot hold it."""
    if isinstance(value, list):
        for number, each in enumerate(value):
            yield from _changed_by_dcp(f"{name}[{number}]", each)
    if not isinstance(value, Mapping):
        return
    if type(value) is not dict and read_unusual(value) is None:  # a module's state is what DCP itself has
        yield f"{name} (a {type(value).__name__} becomes a dict)"
    if not value:
        yield f"{name} (an empty dictionary is left out)"
    seen: dict[str, object] = {}
    for key, each in value.items():
        inner = f"{name}.{key}" if name else str(key)
        if str(key) in seen:
            raise CheckpointError(
                f"{name} has the keys {seen[str(key)]!r} and {key!r}, which are one in a folder of DCP: rename one of "
                "them before it is saved, or leave it out with only= or rename="
            )
        seen[str(key)] = key
        if not isinstance(key, str):
            yield f"{inner} (the key {key!r} becomes text)"
        if key != "state" or "param_groups" not in value or not isinstance(each, Mapping) or len(each):
            # else an optimizer before its first step, which import_dcp() knows
            yield from _changed_by_dcp(inner, each)


def parse_size(text: str) -> int:
    """Return the bytes that "5GB" or "200 MB" says. ValueError for anything else."""
    found = _SIZE.fullmatch(text.strip())
    if not found:
        raise ValueError(f"{text!r} is no size: write it as 5GB or 200MB")
    return int(float(found[1]) * _UNITS[found[2]])


def _collect_tensors(loaded: LoadedCheckpoint, name: str, arrays: Collection[str] = ()) -> dict[str, torch.Tensor]:
    """Return the tensors of an object by their names.

    `arrays`: full names of those that are the bytes of something else.
    """
    state = loaded[name]
    if isinstance(state, torch.Tensor) and name not in arrays:
        return {name: state}
    items = state if isinstance(state, Mapping) else {name: state}
    others = [
        key
        for key, each in items.items()
        if not (isinstance(key, str) and isinstance(each, torch.Tensor)) or _find_full_name(name, key, arrays) in arrays
    ]
    found = {key: each for key, each in items.items() if key not in others}
    if not found or any(not _may_be_left_out(items[key]) for key in others):
        raise CheckpointError(
            f"{name} holds more than tensors by their names ({', '.join(map(repr, others[:8]))}), and safetensors "
            "nothing else: export a module, or all of it to DCP"
        )
    if others:
        _log.warning("%s of %s are plain values, which safetensors does not hold: they are left out", others, name)
    return found


def _may_be_left_out(value: object) -> bool:
    """Tell whether this is a number or a text beside the tensors, and no part of an object: no state, no array."""
    return value is None or isinstance(value, bool | int | float | str)


def _find_full_name(name: str, key: str, known: Collection[str]) -> str:
    """Return the one of the `known` names under which a checkpoint has a tensor of an object, if it is one of them.

    A module's names are paths. In a dictionary, as one of averaged weights by their parameters' names, a key with dots
    is a single piece.
    """
    top = names.escape_segment(name)
    if key == name and top in known:
        return top
    piece = names.join_segments(top, names.escape_segment(key))
    return piece if piece in known else names.join_segments(top, names.of_module(key))


def _split_by_size(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Return the names file by file, each of at most `limit` bytes or one tensor."""
    files: list[list[str]] = [[]]
    size = 0
    for name, own in sizes.items():
        if files[-1] and size + own > limit:
            files.append([])
            size = 0
        files[-1].append(name)
        size += own
    return files


def _count_bytes(tensor: torch.Tensor) -> int:
    return int(prod(tensor.shape)) * get_itemsize(dtype_name(tensor.dtype))


@contextmanager
def _replace_target(target: Path, replace: bool, foreign: type[BaseException]) -> Iterator[Path]:
    """A place beside the target that becomes it when all is written.

    Args:
        target: Where the export is to be.
        replace: Whether something may be there.
        foreign: The error of the library that writes, for instance to a full disk.
    """
    if target.exists() and not replace:
        raise CheckpointError(f"{target} is there already: give another place, or say that it may be replaced")
    target = target.resolve()  # a link stays, and what it leads to is made
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"{target} cannot be made: {error.filename}: {error.strerror}") from error
    place = target.with_name(f".everstep-{target.name}-{secrets.token_hex(4)}")
    old = target.with_name(f".everstep-{target.name}-{secrets.token_hex(4)}")
    try:
        yield place
        if target.is_dir() or (place.is_dir() and target.exists()):
            target.rename(old)
        place.rename(target)
    except (OSError, foreign) as error:
        raise CheckpointError(f"{target} cannot be written: {explain_foreign(error)}") from error
    finally:
        if old.exists() and not target.exists():  # interrupted between the two
            old.rename(target)
        for each in (place, old):
            if each.is_dir():
                shutil.rmtree(each, ignore_errors=True)
            else:
                with suppress(OSError):  # of a place that cannot be written to, nor has it
                    each.unlink()


def explain_foreign(error: BaseException) -> str:
    """Return what another library's error says: the system's own words, where they are behind it.

    One of DCP holds the errors of its ranks, of which the first counts. torch.save() says "unexpected pos" at a full
    disk, while it handles the error that says so.
    """
    failures = getattr(error, "failures", None)
    said: BaseException = next(iter(failures.values()))[0] if failures else error
    behind: BaseException | None = said
    while behind is not None and not isinstance(behind, OSError):
        behind = behind.__cause__ or behind.__context__
    return str(behind or said)
