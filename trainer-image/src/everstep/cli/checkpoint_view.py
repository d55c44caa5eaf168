"""Checkpoints as tables and as JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

from rich.table import Table

from everstep.checkpoint.format.index import CheckpointIndex
from everstep.checkpoint.format.keys import Key
from everstep.checkpoint.format.manifest import Manifest, StoredTensor, get_itemsize
from everstep.checkpoint.format.user_metadata import read_metadata
from everstep.cli.places import format_key
from everstep.cli.terminal import format_duration
from everstep.cli.transfer import format_size


@dataclass(frozen=True)
class CheckpointRow:
    """A row for a committed checkpoint: its index, or why that cannot be read, as "damaged: …" or "unknown: …"."""

    key: Key
    index: CheckpointIndex | None
    why: str = ""
    is_verified: bool = False


def total_bytes(manifest: Manifest) -> int:
    """Return the bytes of all parts."""
    return sum(part.size for part in manifest.parts)


def make_checkpoint_table(rows: Iterable[CheckpointRow]) -> Table:
    """Return a table with one line for each checkpoint."""
    found = _make_table("STEP", "ATTEMPT", "AGE", "SIZE", "RANKS", "TENSORS", "VERIFIED", "")
    for row in rows:
        attempt = f"{row.key.attempt.epoch}.{row.key.attempt.generation}"
        if row.index is None:
            found.add_row(str(row.key.step), attempt, "", "", "", "", "", row.why, style="red")
            continue
        index = row.index
        age = format_duration(max(0.0, time.time() - index.created))
        numbers = format_size(index.bytes), str(index.world), str(len(index.tensors))
        found.add_row(str(row.key.step), attempt, age, *numbers, "yes" if row.is_verified else "not yet", "")
    return found


def describe_row(row: CheckpointRow) -> dict[str, Any]:
    """Return the same for programs: sizes in bytes, times in seconds since 1970."""
    found: dict[str, Any] = {"key": format_key(row.key), "step": row.key.step, "attempt": str(row.key.attempt)}
    if row.index is None:
        kind, _, why = row.why.partition(": ")
        return {**found, kind: why}
    index = row.index
    return {
        **found,
        "created": index.created,
        "bytes": index.bytes,
        "world": index.world,
        "nodes": len(index.nodes),
        "model": index.model,
        "tensors": len(index.tensors),
        "verified": row.is_verified,
        "metadata": read_metadata(index.values),
    }


def summarize_checkpoint(manifest: Manifest) -> str:
    """Return what a checkpoint is, in a few lines."""
    created = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.created))
    lines = {
        "checkpoint": format_key(manifest.key),
        "committed": f"{created} ({format_duration(max(0.0, time.time() - manifest.created))} ago)",
        "ranks": f"{manifest.world} on {manifest.nodes} nodes",
        "model": manifest.model,
        "size": f"{format_size(total_bytes(manifest))} in {len(manifest.parts)} parts",
        "checksums": manifest.checksum,
        **({"metadata": ""} if read_metadata(manifest.values) else {}),
    }
    lines |= {f"  {name}": json.dumps(each) for name, each in read_metadata(manifest.values).items()}
    return "\n".join(f"{name:<11} {value}" for name, value in lines.items())


def make_tensor_table(manifest: Manifest) -> Table:
    """Return a table with one line for each tensor."""
    found = _make_table("TENSOR", "TYPE", "SHAPE", "SIZE", "SHARDS")
    for name, tensor in sorted(manifest.tensors.items()):
        shape = " x ".join(map(str, tensor.shape)) or "scalar"
        found.add_row(name, tensor.dtype, shape, format_size(_tensor_bytes(tensor)), str(len(tensor.shards)))
    return found


def make_value_table(manifest: Manifest) -> Table:
    """Return a table with one line for each plain value, shortened."""
    found = _make_table("VALUE", "")
    for name, value in sorted(manifest.values.items()):
        text = json.dumps(value)
        found.add_row(name, text if len(text) <= 100 else f"{text[:97]}...")
    return found


def _tensor_bytes(tensor: StoredTensor) -> int:
    return prod(tensor.shape) * get_itemsize(tensor.dtype)


def _make_table(*columns: str) -> Table:
    found = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        found.add_column(column, no_wrap=True, justify="right" if column in {"SIZE", "RANKS", "TENSORS"} else "left")
    return found
