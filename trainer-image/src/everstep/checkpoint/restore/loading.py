"""One rank's share of a restore: which chunks of which parts it needs, and where their bytes go.

Resharding is torch.distributed.checkpoint's: its load planner says which box of which saved shard belongs into which
box of a tensor of ours. Bytes are addressed as in the manifest, (part, offset), wherever they lie.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from everstep.checkpoint.catalog.chunk_reads import ChunkRead
from everstep.checkpoint.errors import CheckpointError, Damaged
from everstep.checkpoint.format.manifest import Manifest, StoredTensor
from everstep.checkpoint.restore.chunk_numbers import Chunks
from everstep.checkpoint.restore.load_items import LoadItem, ShardPlace, find_shard
from everstep.checkpoint.restore.node_cache import NodeCache
from everstep.checkpoint.restore.options import RestoreOptions
from everstep.checkpoint.restore.placing import Memory, ShardBox
from everstep.checkpoint.state.flat import RANK, bind_kinds, get_local_tensor
from everstep.checkpoint.state.group_order import find_order_problems
from everstep.checkpoint.state.kinds import WHOLE, Absent, ObjectKind, Saved
from everstep.checkpoint.state.plain import StatefulObject, StateValue
from everstep.checkpoint.state.staging import Host

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

_BATCH = 1 << 28  # elements
_THROUGH = 128 << 20  # bytes of memory through which tensors are filled that cannot be read into
_PIECE = 24 << 20  # bytes of a tensor that go through that memory as one, where it can be cut
_ALIGN = 64  # bytes
_GIVEN = 1 << 16  # bytes from which a new tensor stays where it was read: a smaller one would hold more than itself


class Loading:
    """The tensors and values that this rank wants of a checkpoint. Making one touches no object; apply() does.

    Attributes:
        problems: Why the checkpoint does not fit the objects.
        wanted: Names of the tensors that this rank takes.
        missing: Names that are here and not in the checkpoint, which are no problems unless the restore is strict.
        not_restored: Names of objects that stay as they are, because they are each rank's own and the number of ranks
            is another.
        defaults: After apply(), keys of dictionaries that kept their values, because the checkpoint does not have them,
            and scalers that it has no state of.
        taken: After apply(), the states that objects have taken in, by prefix: see StatefulObject.taken.
    """

    def __init__(
        self,
        manifest: Manifest,
        objects: Mapping[str, object],
        *,
        rank: int,
        world: int,
        options: RestoreOptions = RestoreOptions(),  # noqa: B008 - frozen
    ) -> None:
        self.problems: list[str] = []
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self._cast: dict[str, torch.Tensor] = {}  # tensors of the objects that are of another type than what is read
        self.not_restored: list[str] = []
        self.defaults: list[str] = []
        self.taken: dict[str, Any] = {}
        self._saved: list[tuple[ObjectKind, Saved]] = []
        self._tensors: dict[str, torch.Tensor] = {}
        everything = Saved.of(manifest, allow_pickle=options.allow_pickle, casts=options.casts)
        for kind in bind_kinds(objects, rank=rank):
            if world != manifest.world and kind.prefix.startswith(f"{RANK}."):
                self.not_restored.append(kind.prefix.removeprefix(f"{RANK}.{rank}."))
                continue
            saved = everything.below(kind.prefix)
            if not saved and kind.prefix.removeprefix(f"{RANK}.{rank}.") in options.optional:
                self.not_restored.append(kind.prefix.removeprefix(f"{RANK}.{rank}."))
                continue
            if not saved and not (kind.exclusive and options.is_strict):
                self.problems.append(Absent.of_object(kind.prefix))
                if not options.is_strict:
                    continue
            if options.elsewhere and isinstance(kind, StateValue):
                saved = saved.without(options.elsewhere)
            self._check_values(saved)
            self._tensors.update(kind.targets(saved, self.problems))
            self._saved.append((kind, saved))
        self.problems += find_order_problems(self._saved)
        self.missing = [each.name for each in self.problems if isinstance(each, Absent)]
        if not options.is_strict:
            self.problems = [each for each in self.problems if not isinstance(each, Absent)]
        if not self.problems:
            self._read_beside(manifest)
        self.wanted = set(self._tensors)
        self._sources: dict[tuple[str, int], ShardPlace] = {}
        self._read_first: set[int] = set()  # ids of items
        self._items: list[LoadItem] = [] if self.problems else self._plan(manifest)

    def needs(self, manifest: Manifest, chunks: Chunks, in_file: Callable[[int], bool]) -> set[int]:
        """Return the numbers of the chunks that the node verifies for this rank before apply() reads them.

        `in_file(i)`: part i is in a file that is read twice. All others are brought into the node's memory first.
        """
        found: set[int] = set()
        for item in self._items:
            tensor = manifest.tensors[item.name]
            shard = tensor.shards[item.shard]
            if in_file(shard.chunks[0].part) and item.is_new and self._is_direct(item, tensor):
                continue  # first_reads() verifies them
            if item.lengths == shard.sizes:
                found.update(chunks.of(shard))
                continue
            box = item.box(tensor)
            found.update(chunks.within(shard, box.start, box.stop))
        return found

    def first_reads(self, manifest: Manifest, in_file: Callable[[int], bool]) -> list[ChunkRead]:
        """Return the reads of what goes into new memory.

        No object has it yet, so one pass verifies the bytes and loads them.
        """
        items = [
            item
            for item in self._items
            if item.is_new
            and in_file(self._sources[item.name, item.shard].part)
            and self._is_direct(item, manifest.tensors[item.name])
        ]
        self._take_memory(items)
        reads: list[ChunkRead] = []
        for item in items:
            self._read_first.add(id(item))
            target = self._tensors[item.name] if item.target.is_meta else item.target
            reads += item.reads_into(manifest.tensors[item.name], target) or ()
        return reads

    def _is_direct(self, item: LoadItem, tensor: StoredTensor) -> bool:
        """Tell whether the bytes can be read right into the target, once that has memory."""
        if item.target.is_meta:
            return True
        return item.reads_into(tensor, item.target) is not None

    def _take_memory(self, items: Sequence[LoadItem]) -> None:
        """Give new tensors their memory: large ones share one piece, in large pages."""
        large = [item for item in items if item.target.is_meta and item.target.nbytes >= _GIVEN]
        memory = Memory(sum(_choose_buffer_size(item.target.nbytes) for item in large))
        at = 0
        for item in large:
            like = item.target
            found = torch.frombuffer(memory.view, dtype=like.dtype, count=like.numel(), offset=at)
            self._tensors[item.name] = found.view(like.shape)
            at += _choose_buffer_size(like.nbytes)
        for item in items:
            if item.target.is_meta and item.target.nbytes < _GIVEN:
                self._tensors[item.name] = _allocate_target(item.target)

    def apply(
        self,
        manifest: Manifest,
        cache: NodeCache,
        alive: Callable[[], None],
        in_file: Callable[[int], bool],
        read: Callable[[Sequence[ChunkRead]], None],
    ) -> dict[str, Any]:
        """Bring the bytes into the objects and give them their values; return plain values that were given, by name.

        Args:
            manifest: Of the checkpoint.
            cache: The parts that the node's memory holds, of which only bytes of the needed chunks are looked at.
            alive: Is called between two things that take a while.
            in_file: Whether part i is in a file instead.
            read: Reads from those files, summing; Damaged when the bytes are no longer those that were verified.
        """
        rest = [item for item in self._items if id(item) not in self._read_first]
        files = [item for item in rest if in_file(self._sources[item.name, item.shard].part)]
        self._take_memory(files)
        self._read_files(files, manifest, read, alive)
        far = [item for item in rest if not in_file(self._sources[item.name, item.shard].part)]
        kept = self._copy(far, lambda part: cache.part(part, manifest), alive, cache.gives)
        cache.keep(kept)  # before loaders begin: their workers would hold the rest of it for as long as they live
        self._tensors = {
            name: _allocate_target(tensor) for name, tensor in self._tensors.items()
        }  # those without elements
        self._take_casts()
        for kind, saved_state in self._saved:
            try:
                kind.load(saved_state, self._tensors)
            except Exception as error:
                error.add_note(f"raised while {kind.prefix} took in what {manifest.key} has of it")
                raise
            alive()
        values = [kind for kind, _ in self._saved if isinstance(kind, StateValue)]
        self.defaults = [
            name for kind, _ in self._saved if isinstance(kind, StateValue | StatefulObject) for name in kind.kept
        ]
        self.taken = {kind.prefix: kind.taken for kind, _ in self._saved if isinstance(kind, StatefulObject)}
        return {kind.prefix: kind.value for kind in values}

    def _read_files(
        self,
        items: Sequence[LoadItem],
        manifest: Manifest,
        read: Callable[[Sequence[ChunkRead]], None],
        alive: Callable[[], None],
    ) -> None:
        direct: list[ChunkRead] = []
        others: list[tuple[ShardBox, torch.Tensor]] = []
        for item in items:
            tensor = manifest.tensors[item.name]
            target = self._tensors[item.name] if item.target.is_meta else item.target
            reads = item.reads_into(tensor, target)
            if reads is None:
                others += _cut(item.box(tensor), target)
            else:
                direct += reads
        read(direct)
        others.reverse()  # they are taken from the end, and lie in this order
        room = max([_THROUGH, *(box.room + _ALIGN for box, _ in others)]) if others else 0
        memory = Memory(room, pinned=any(target.is_cuda for _, target in others)) if others else None
        while others and memory is not None:
            at, reads, moves = 0, list[ChunkRead](), list[tuple[torch.Tensor, torch.Tensor]]()
            while others and at + _choose_buffer_size(others[-1][0].room) <= room:
                box, target = others.pop()
                more, saved = box.reads_through(memory, at)
                reads += more
                moves.append((target, saved))
                at += _choose_buffer_size(box.room)
            read(reads)
            for target, saved in moves:
                target.copy_(saved)
            alive()

    def _copy(
        self,
        every: Sequence[LoadItem],
        part: Callable[[int], memoryview],
        alive: Callable[[], None],
        gives: Callable[[int], bool],
    ) -> dict[int, list[tuple[int, int]]]:
        """Copy what the node's memory holds; return, by part, (offset, length) of tensors that stay there."""
        host, kept = Host(), dict[int, list[tuple[int, int]]]()
        for items in _iterate_batches(every):
            moves: list[tuple[torch.Tensor, torch.Tensor]] = []
            for item in items:
                saved, target = self._box(item, part), item.target
                if target.is_meta:
                    source = self._sources[item.name, item.shard]
                    if source.length >= _GIVEN and gives(source.part):
                        kept.setdefault(source.part, []).append((source.offset, source.length))
                        self._tensors[item.name] = saved
                        continue
                    target = self._tensors[item.name] = _allocate_target(target)
                moves.append((target, saved))
            host.copy([target for target, _ in moves], [saved for _, saved in moves])
            alive()
        host.close()
        return kept

    def _box(self, item: LoadItem, part: Callable[[int], memoryview]) -> torch.Tensor:
        """Return the saved bytes of one item, as a tensor."""
        source = self._sources[item.name, item.shard]
        saved = source.view(part(source.part))
        if item.lengths != source.sizes:
            for dim, (start, length) in enumerate(zip(item.offsets, item.lengths, strict=True)):
                saved = saved.narrow(dim, start, length)
        return saved

    def _read_beside(self, manifest: Manifest) -> None:
        """Give what is to be cast memory of its own, in the type that it was saved in."""
        for name, target in self._tensors.items():
            dtype = getattr(torch, manifest.tensors[name].dtype)
            if not target.is_meta and target.dtype is not dtype:
                self._cast[name] = target
                device = "meta" if type(target) in WHOLE else target.device  # on meta: read into new memory at once
                self._tensors[name] = torch.empty_like(target, dtype=dtype, device=device, requires_grad=False)

    def _take_casts(self) -> None:
        with torch.no_grad():
            for name, target in self._cast.items():
                target.copy_(self._tensors[name])
                self._tensors[name] = target
        self._cast.clear()

    def exclusive(self) -> list[str]:
        """Return the prefixes below which every tensor of the checkpoint must be wanted by some rank."""
        return [kind.prefix for kind, _ in self._saved if kind.exclusive and not kind.prefix.startswith(f"{RANK}.")]

    def _plan(self, manifest: Manifest) -> list[LoadItem]:
        found: list[LoadItem] = []
        targets, others = dict(self._tensors), dict[str, torch.Tensor]()
        for name, target in targets.items():
            saved = manifest.tensors[name]
            if type(target) in WHOLE and [shard.sizes for shard in saved.shards] == [saved.shape]:
                # Most tensors, and nothing to plan: torch's planner would take longer than a small model's bytes do.
                found.append(LoadItem(name, 0, (0,) * len(saved.shape), saved.shape, target, target.is_meta))
            else:
                others[name] = self._tensors[name] = _allocate_target(target)
        new = {name for name, tensor in others.items() if tensor is not targets[name]}
        found += (
            [replace(item, is_new=item.name in new) for item in plan_resharded_reads(others, manifest)]
            if others
            else []
        )
        found = [item for item in found if prod(item.lengths)]
        _check_filled({name: others.get(name, target) for name, target in targets.items()}, found)
        for item in found:
            if (item.name, item.shard) not in self._sources:
                self._sources[item.name, item.shard] = find_shard(item.name, manifest.tensors[item.name], item.shard)
        return found

    def _check_values(self, saved: Saved) -> None:
        # Before anything is touched, because an object that was half loaded is neither old nor new.
        for name in saved.values:
            try:
                saved.value(name)
            except CheckpointError as error:
                self.problems.append(str(error))


def _allocate_target(target: torch.Tensor) -> torch.Tensor:
    """Return the target, with memory of its own if it had none."""
    if not target.is_meta:
        return target
    if target.is_contiguous():  # twenty times as fast as empty_like, which asks torch's Python for the strides
        return torch.empty(target.shape, dtype=target.dtype, device="cpu")
    return torch.empty_like(target, device="cpu")


def _check_filled(targets: Mapping[str, torch.Tensor], items: Iterable[LoadItem]) -> None:
    """Damaged when elements of a target would be left as they are: nothing of the checkpoint is read for them."""
    filled: dict[str, int] = defaultdict(int)
    for item in items:
        filled[item.name] += prod(item.lengths)
    for name, target in targets.items():
        if filled[name] != get_local_tensor(target).numel():
            raise Damaged(
                name, f"of {get_local_tensor(target).numel()} elements here the checkpoint has {filled[name]}"
            )


def _cut(box: ShardBox, target: torch.Tensor) -> Iterator[tuple[ShardBox, torch.Tensor]]:
    """Yield a box with its target, in pieces where it has too many bytes for the memory that it goes through.

    That memory is page-locked for a GPU, and torch never gives such memory back: it may not be as large as the largest
    tensor.
    """
    is_plain = target.is_contiguous() and not target.is_conj() and not target.is_neg()
    if box.room + _ALIGN <= _PIECE or not (is_plain and box.in_one_piece):
        yield box, target
        return
    elements = target.detach().view(-1)
    for piece, at in box.pieces(_PIECE):
        yield piece, elements[at : at + prod(piece.lengths)]


def _choose_buffer_size(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def plan_resharded_reads(tensors: Mapping[str, torch.Tensor], manifest: Manifest) -> Iterator[LoadItem]:
    """Yield by torch's planner which boxes of saved shards fill these tensors, sharded in any way or not."""
    # Only here: a process that has nothing to cut anew need not wait a second for the import.
    from torch.distributed.checkpoint import DefaultLoadPlanner

    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(tensors), make_metadata(manifest, tensors))
    for item in planner.create_local_plan().items:
        index = item.storage_index.index
        assert isinstance(index, int)
        offsets, lengths = tuple(item.storage_offsets), tuple(item.lengths)
        yield LoadItem(item.storage_index.fqn, index, offsets, lengths, planner.resolve_tensor(item))


def _iterate_batches(items: Sequence[LoadItem]) -> Iterator[list[LoadItem]]:
    """Yield as many items at a time as are copied in a moment: between two batches this rank says that it is alive."""
    batch: list[LoadItem] = []
    elements = 0
    for item in items:
        batch.append(item)
        elements += prod(item.lengths)
        if elements >= _BATCH:
            yield batch
            batch, elements = [], 0
    if batch:
        yield batch


def make_metadata(manifest: Manifest, names: Iterable[str]) -> Metadata:
    """Return what torch's planners need to know about these tensors of a checkpoint."""
    from torch.distributed.checkpoint.metadata import Metadata

    return Metadata({name: _make_tensor_metadata(manifest.tensors[name]) for name in names})


def _make_tensor_metadata(tensor: StoredTensor) -> TensorStorageMetadata:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata

    return TensorStorageMetadata(
        TensorProperties(dtype=getattr(torch, tensor.dtype)),
        torch.Size(tensor.shape),
        [ChunkStorageMetadata(torch.Size(shard.offsets), torch.Size(shard.sizes)) for shard in tensor.shards],
    )
