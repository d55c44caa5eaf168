"""Tensors of a checkpoint into the objects of one process, which agrees with no other: what load_into() does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from everstep.checkpoint.format.manifest import Manifest
from everstep.checkpoint.restore.loading import plan_resharded_reads
from everstep.checkpoint.restore.tensor_reader import TensorReader
from everstep.checkpoint.state.casting import Casts
from everstep.checkpoint.state.flat import RANK, bind_kinds
from everstep.checkpoint.state.group_order import find_order_problems
from everstep.checkpoint.state.kinds import WHOLE, Absent, ObjectKind, Saved, StateMismatch
from everstep.checkpoint.state.plain import StatefulObject, StateValue
from everstep.checkpoint.state.zero_redundancy import ZeroRedundancyObject


@dataclass(frozen=True)
class _Box:
    """A box of a saved shard, and the tensor or the piece of one that it fills."""

    name: str
    shard: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    target: torch.Tensor


class ObjectFilling:
    """The tensors that objects of one process take of a checkpoint. Making one touches no object; fill() does."""

    def __init__(
        self, manifest: Manifest, objects: Mapping[str, object], casts: Casts, *, allow_pickle: bool, strict: bool
    ) -> None:
        self._manifest = manifest
        self._kinds: list[tuple[ObjectKind, Saved]] = []
        self._tensors: dict[str, torch.Tensor] = {}
        self.not_restored: list[str] = []
        self.kept: list[str] = []  # after fill()
        self.missing: list[str] = []
        problems: list[str] = []
        everything = Saved.of(manifest, allow_pickle=allow_pickle, casts=casts)
        exclusive: list[str] = []
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        for kind in bind_kinds(objects, rank=rank):
            if kind.prefix.startswith(f"{RANK}."):
                self.not_restored.append(kind.prefix.removeprefix(f"{RANK}.{rank}."))
                continue
            saved = everything.below(kind.prefix)
            if not saved:
                problems.append(Absent.of_object(kind.prefix))
                continue
            for name in saved.values:
                saved.value(name)
            self._tensors.update(kind.targets(saved, problems))
            self._kinds.append((kind, saved))
            if kind.exclusive and not isinstance(kind, ZeroRedundancyObject):  # of which other ranks hold the rest
                exclusive.append(f"{kind.prefix}.")
        problems += find_order_problems(self._kinds)
        self.missing = [each.name for each in problems if isinstance(each, Absent)]
        self.unexpected = [
            name for name in manifest.tensors if name.startswith(tuple(exclusive)) and name not in self._tensors
        ]
        if not strict:
            problems = [each for each in problems if not isinstance(each, Absent)]
        elif all(isinstance(each, Absent) for each in problems):  # else a tensor may be here, of another type or shape
            problems += [f"{name} is in the checkpoint, and nothing here has it" for name in self.unexpected]
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
        for item in plan_resharded_reads(spread, self._manifest) if spread else ():  # which imports torch's planner
            if 0 not in item.lengths:
                yield _Box(item.name, item.shard, item.offsets, item.lengths, item.target)

    def chunks(self, reader: TensorReader) -> Iterator[list[Any]]:
        """Yield the chunks that fill() reads, tensor by tensor."""
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
            if isinstance(kind, StateValue | StatefulObject):
                self.kept += kind.kept
        return {kind.prefix: kind.value for kind, _ in self._kinds if isinstance(kind, StateValue)}
