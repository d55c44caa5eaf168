"""Checkpoints of a store in other libraries' files, which those libraries read themselves."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from glob import escape
from math import prod
from pathlib import Path
from typing import Any

import torch

from everstep.checkpoint.casting import Cast
from everstep.checkpoint.errors import CheckpointError
from everstep.checkpoint.format import itemsize
from everstep.checkpoint.keys import Key
from everstep.checkpoint.load import LoadedCheckpoint, load
from everstep.checkpoint.selection import Only, Rename, rename_leaves
from everstep.checkpoint.state import names
from everstep.checkpoint.state.kinds import dtype_name

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
    `model.safetensors.index.json`. It is there whole or not at all. Takes the memory of one file.

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
        CheckpointError: The object is not in the checkpoint, or the target is there already.
        NoSuchStep, NoGoodCheckpoint: As load().
    """
    from safetensors.torch import save_file

    path = Path(target)
    shapes = load(uri, step=step, only=name, map_location="meta", cast=cast, options=options)
    key, tensors = shapes.key, _tensors(shapes, name)
    called = rename_leaves({each: each for each in tensors}, rename)  # new names, and the saved ones
    single = path.suffix == ".safetensors"
    if single and config is not None:
        raise CheckpointError(f"{path} is a file: a config.json belongs into a folder; give a folder as the target")
    sizes = {new: _nbytes(tensors[old]) for new, old in called.items()}
    files = [list(called)] if single else _split(sizes, max_shard_bytes)

    def read(new_names: list[str]) -> dict[str, torch.Tensor]:
        if not new_names:
            return {}
        wanted = [escape(_full(name, called[new])) for new in new_names]
        found = _tensors(load(uri, step=key, only=wanted, cast=cast, options=options), name)
        # Tied tensors have memory of their own each, once they are loaded: safetensors refuses a shared one.
        return {new: found[called[new]].contiguous() for new in new_names}

    with _put(path, replace) as place:
        if single:
            save_file(read(files[0]), place, metadata={"format": "pt"})
            return key
        place.mkdir()
        weights: dict[str, str] = {}
        for number, own in enumerate(files, 1):
            file = "model.safetensors" if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
            save_file(read(own), place / file, metadata={"format": "pt"})
            weights.update(dict.fromkeys(own, file))
        if len(files) > 1:
            index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": dict(sorted(weights.items()))}
            (place / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
        if config is not None:
            shutil.copyfile(config, place / "config.json")
    return key


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
        CheckpointError: The folder is there already.
        NoSuchStep, NoGoodCheckpoint: As load().
    """
    import torch.distributed.checkpoint as dcp

    path = Path(folder)
    loaded = load(uri, step=step, only=only, rename=rename, cast=cast, options=options)
    state = {name: each for name, each in loaded.items() if name != "rank"}
    with _put(path, replace) as place:
        dcp.save(state, storage_writer=dcp.FileSystemWriter(place), no_dist=True)
    return loaded.key


def parse_size(text: str) -> int:
    """Return the bytes that "5GB" or "200 MB" says. ValueError for anything else."""
    found = _SIZE.fullmatch(text.strip())
    if not found:
        raise ValueError(f"{text!r} is no size: write it as 5GB or 200MB")
    return int(float(found[1]) * _UNITS[found[2]])


def _tensors(loaded: LoadedCheckpoint, name: str) -> dict[str, torch.Tensor]:
    state = loaded[name]
    if isinstance(state, torch.Tensor):
        return {name: state}
    found = {key: each for key, each in state.items() if isinstance(each, torch.Tensor)}
    if not found or any(isinstance(each, Mapping | list | tuple) for each in state.values()):
        raise CheckpointError(
            f"{name} holds more than tensors by their names, and safetensors nothing else: export a module, or all of "
            "it to DCP"
        )
    return found


def _full(name: str, key: str) -> str:
    """How the checkpoint calls a tensor of an object."""
    return names.join(names.segment(name), "" if key == name else names.of_module(key))


def _split(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Names file by file, each of at most `limit` bytes or one tensor."""
    files: list[list[str]] = [[]]
    size = 0
    for name, own in sizes.items():
        if files[-1] and size + own > limit:
            files.append([])
            size = 0
        files[-1].append(name)
        size += own
    return files


def _nbytes(tensor: torch.Tensor) -> int:
    return int(prod(tensor.shape)) * itemsize(dtype_name(tensor.dtype))


@contextmanager
def _put(target: Path, replace: bool) -> Iterator[Path]:
    """A place beside the target that becomes it when all is written."""
    if target.exists() and not replace:
        raise CheckpointError(f"{target} is there already: give another place, or say that it may be replaced")
    target.parent.mkdir(parents=True, exist_ok=True)
    place = target.with_name(f".everstep-{target.name}-{secrets.token_hex(4)}")
    old = target.with_name(f".everstep-{target.name}-{secrets.token_hex(4)}")
    try:
        yield place
        if target.is_dir():
            target.rename(old)
        place.rename(target)
    finally:
        for each in (place, old):
            if each.is_dir():
                shutil.rmtree(each, ignore_errors=True)
            else:
                each.unlink(missing_ok=True)
