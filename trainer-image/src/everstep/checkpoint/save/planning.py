"""Plan which rank writes what: agreed once by all ranks through rank 0, and kept until the state has another layout.

Replicas are written once, by one of the ranks that have them, and are compared first: what is called the same must be
the same. The messages and the sums are those of plan_coordinator.py and write_shares.py; this module holds what needs
torch.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
import xxhash

from everstep.checkpoint.errors import CheckpointError
from everstep.checkpoint.format.descriptions import KIND, is_description
from everstep.checkpoint.format.manifest import HEADER, align_offset, get_itemsize
from everstep.checkpoint.format.nested_names import find_nested_states
from everstep.checkpoint.host.interruptions import find_interruption
from everstep.checkpoint.save.layouts import LayoutNames, Ownership, RankLayout, span_of_box
from everstep.checkpoint.save.plan_coordinator import PlanCoordinator, RankMessages
from everstep.checkpoint.save.tensor_checksums import checksum_tensors
from everstep.checkpoint.save.value_sums import mark_value
from everstep.checkpoint.slots.slots import Box
from everstep.checkpoint.state import names
from everstep.checkpoint.state.flat import RANK, Flat, get_local_tensor
from everstep.checkpoint.state.loaded import is_dtensor
from everstep.checkpoint.state.structure_sums import describe_structures
from everstep.coordination.group import RankGroup

_log = logging.getLogger("everstep.checkpoint")

Signature = Mapping[str, tuple[Any, ...]]


@dataclass(frozen=True)
class WritePlan:
    """One rank's share: what goes to `boxes` of its part. `sizes`: bytes of the parts of all ranks."""

    boxes: tuple[Box, ...]
    sizes: tuple[int, ...]
    model: str
    signature: Signature

    def sources(self, tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """Return the local tensors to be copied, in the order of `boxes`; for a state whose signature is the plan's."""
        return [get_local_tensor(tensors[box.tensor]) for box in self.boxes]


def compute_signature(tensors: Mapping[str, torch.Tensor], elsewhere: Collection[str] = ()) -> Signature:
    """Return the properties that a plan depends on: a state with other ones needs another plan.

    `elsewhere`: see Flat.
    """
    return {
        name: (tensor.dtype, tensor.shape, tensor._spec if is_dtensor(tensor) else None, name in elsewhere)
        for name, tensor in tensors.items()
    }


def make_save_plan(state: Callable[[], Flat], rank: int, group: RankGroup, *, compare: bool = False) -> WritePlan:
    """Return this rank's plan. Collective, whatever fails on a rank.

    Args:
        state: Makes the state that is to be saved.
        compare: Whether the ranks see that replicas have the same bytes, and plain values the same content. That reads
            all of the state once.

    Raises:
        CheckpointError: On all ranks alike, if any cannot plan, or replicas differ. Names ranks and tensors.
        RankLost: A rank is gone.
    """
    coordinator = PlanCoordinator()
    messages: RankMessages | None = None
    interruption: BaseException | None = None
    try:
        flat = state()
        if compare and rank == 0:
            _warn_of_classes(flat)
        pieces = list_boxes(flat, rank)
        values = _checksum_values(flat, rank) if compare and group.size > 1 else {}
        messages = RankMessages(_describe_rank_layout(pieces, rank), values)
        head = messages.head()
    except Exception as error:  # the others wait for this rank: it tells them instead
        interruption = find_interruption(error)
        head = RankMessages.failure(f"rank {rank} cannot save its state: {error}")
    with _raising_instead(interruption):
        wanted = _ask_first_rank(head, coordinator.ask, group)
        answer = _ask_first_rank(messages.details(wanted) if messages else b"", coordinator.share, group)
        share = (messages or RankMessages(_describe_rank_layout([], rank), {})).share(answer)
    plan = _build_save_plan(
        [pieces[place] for place in share.writes],
        share.sizes,
        share.model,
        compute_signature(flat.tensors, flat.elsewhere),
    )
    if compare:
        try:
            sums = RankMessages.sums(
                checksum_tensors([get_local_tensor(pieces[place].tensor) for place in share.compares])
            )
        except Exception as error:
            interruption = find_interruption(error)
            sums = RankMessages.failure(f"rank {rank} cannot read its state: {error}")
        with _raising_instead(interruption):
            RankMessages.check(_ask_first_rank(sums, coordinator.judge, group))
    return plan


@contextlib.contextmanager
def _raising_instead(interruption: BaseException | None) -> Iterator[None]:
    """Raise what has interrupted this rank, where the others have been told and all of them hear of a failure."""
    try:
        yield
    except CheckpointError as error:
        if interruption is not None:
            raise interruption from error
        raise


def _warn_of_classes(flat: Flat) -> None:
    """Say which tensors come back as plain ones, unless the script holds one of their class when it restores."""
    if flat.classes:
        name, kind = next(iter(flat.classes.items()))
        more = f", and {len(flat.classes) - 1} more like it" if len(flat.classes) > 1 else ""
        _log.warning(
            "%s is a %s: its elements are saved, not its class. It is restored as a Tensor where the script holds no "
            "%s of this name and shape when it restores: hold one, or save as_subclass(torch.Tensor)%s",
            name,
            kind,
            kind,
            more,
        )


@dataclass(frozen=True)
class Piece:
    """The box that a rank has of a tensor at `offsets` of `sizes`; of nothing where a size is zero."""

    name: str
    tensor: torch.Tensor
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    claim: Ownership

    @property
    def dtype(self) -> str:
        return str(self.tensor.dtype).removeprefix("torch.")

    @property
    def bytes(self) -> int:
        return prod(self.sizes) * get_itemsize(self.dtype)


def list_boxes(flat: Flat, rank: int) -> list[Piece]:
    """Return what this rank has of each tensor, in the order of the state. CheckpointError for what cannot be saved."""
    own = f"{RANK}.{rank}."
    known: dict[Any, tuple[tuple[int, ...], tuple[int, ...]]] = {}  # an optimizer's state is cut as its parameters are
    pieces = []
    for name, tensor in flat.tensors.items():
        shape = tuple(tensor.shape)
        offsets, sizes = (0,) * len(shape), shape
        if is_dtensor(tensor):
            kind = (shape, id(tensor.device_mesh), tensor.placements)
            if kind not in known:
                known[kind] = _shard_of(name, tensor)
            offsets, sizes = known[kind]
        elif type(tensor).__name__ == "ShardedTensor":
            raise CheckpointError(f"{name}: a ShardedTensor cannot be saved; use a DTensor (FSDP2)")
        claim = (
            Ownership.OWN
            if name.startswith(own)
            else Ownership.ELSEWHERE
            if name in flat.elsewhere
            else Ownership.SHARED
        )
        if claim is Ownership.OWN and sizes != shape:
            raise CheckpointError(
                f"{name}: a shard of a tensor that ranks hold together cannot be one rank's own; give the object "
                "without PerRank"
            )
        pieces.append(Piece(name, tensor, shape, offsets, sizes, claim))
        get_itemsize(pieces[-1].dtype)
    return pieces


def _shard_of(name: str, tensor: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh = tensor.device_mesh
    if any(placement.is_partial() for placement in tensor.placements):
        raise CheckpointError(f"{name}: a partial sum cannot be saved; redistribute the DTensor first")
    if mesh.get_coordinate() is None:
        return (0,) * tensor.ndim, (0,) * tensor.ndim
    sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, mesh, tensor.placements)
    held = get_local_tensor(tensor).shape
    if tuple(held) != tuple(sizes):
        raise CheckpointError(f"{name}: a shard has the shape {list(held)}, and its placements say {list(sizes)}")
    return tuple(offsets), tuple(sizes)


def _describe_rank_layout(pieces: Sequence[Piece], rank: int) -> RankLayout:
    own = f"{RANK}.{rank}."
    spans = [span_of_box(piece.shape, piece.offsets, piece.sizes) for piece in pieces]
    return RankLayout(
        LayoutNames(
            tuple(piece.name.removeprefix(own) for piece in pieces),
            tuple(piece.dtype for piece in pieces),
            tuple(piece.shape for piece in pieces),
            tuple(piece.claim for piece in pieces),
        ),
        np.array(spans, np.int64).reshape(-1, 2),
    )


def _build_save_plan(pieces: Sequence[Piece], sizes: tuple[int, ...], model: str, own: Signature) -> WritePlan:
    boxes = []
    offset = HEADER
    for piece in sorted(pieces, key=lambda each: -each.bytes):
        boxes.append(Box(piece.name, piece.dtype, piece.shape, piece.offsets, piece.sizes, offset, piece.bytes))
        offset = align_offset(offset + piece.bytes)
    return WritePlan(tuple(boxes), sizes, model, own)


def _ask_first_rank(mine: bytes, decide: Callable[[Sequence[bytes]], list[bytes]], group: RankGroup) -> bytes:
    """Return what rank 0 answers this rank, after it has heard all of them."""
    messages = group.gather_bytes(mine)
    return group.scatter_bytes(decide(messages) if messages is not None else None)


def _write_value(value: object) -> str:
    """Return a packed value as a text that is the same for equal ones. A number's is had without an encoder: a table
    may have a hundred thousand of them."""
    return repr(value) if type(value) in (int, bool) else json.dumps(value, sort_keys=True)


def _checksum_values(flat: Flat, rank: int) -> dict[str, str]:
    own = f"{RANK}.{rank}."
    shared = {name: value for name, value in flat.values.items() if not name.startswith(own)}
    sums = {
        name: mark_value(xxhash.xxh3_64_hexdigest(_write_value(value).encode()), value)
        for name, value in shared.items()
        if not is_description(name)
    }
    nested = {names.join_segments(each, KIND): "" for each in find_nested_states(shared)}
    return {**sums, **nested, **describe_structures(flat, own)}
