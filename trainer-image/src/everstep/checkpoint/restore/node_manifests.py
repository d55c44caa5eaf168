"""Read the node manifests of a checkpoint that this node needs: each once, shared by all its ranks.

The index says which node holds which boxes. A rank of a model that is sharded needs the manifests of one node or a few,
however many there are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from everstep.checkpoint.catalog.manifests import assemble_manifest, parse_index, parse_node
from everstep.checkpoint.catalog.selection import rename_leaves, rename_manifest
from everstep.checkpoint.format.coverage import Region
from everstep.checkpoint.format.index import CheckpointIndex
from everstep.checkpoint.format.keys import Key
from everstep.checkpoint.format.manifest import Manifest
from everstep.checkpoint.ranks.topology import Topology
from everstep.checkpoint.restore.node_cache import NodeCache, pack_numbers, unpack_numbers
from everstep.checkpoint.restore.options import RestoreOptions
from everstep.checkpoint.state.flat import RANK, bind_kinds
from everstep.checkpoint.state.kinds import Saved
from everstep.checkpoint.state.loaded import is_dtensor

_INDEX = "index"


class NodeManifests:
    """One rank's side of reading the manifest of a checkpoint, as far as its node needs it."""

    def __init__(self, key: Key, cache: NodeCache, topology: Topology, read: Callable[[str], bytes]) -> None:
        """`read`: a small object of the store, by its name."""
        self._key = key
        self._cache = cache
        self._topology = topology
        self._read = read
        self._index: CheckpointIndex | None = None

    def fetch_index(self) -> None:
        """Read the index, and the only node manifest where there is but one. The node's leader calls it.

        Raises:
            Damaged: It does not hold.
            Missing: There is none.
            UnknownFormat: It is in a format that this version does not know.
            StoreError: The store cannot be read.
        """
        data = self._read(self._key.manifest_name)
        index = self._index = parse_index(self._key, data)
        self._cache.leave(_INDEX, data)
        if len(index.nodes) == 1:
            self._fetch(index, 0)

    def index(self) -> CheckpointIndex:
        """Return the index that the leader has fetched."""
        if self._index is None:
            self._index = parse_index(self._key, self._cache.message(_INDEX))
        return self._index

    def ask(self, index: CheckpointIndex, objects: Mapping[str, object], options: RestoreOptions) -> None:
        """Say to the other ranks of the node what this one needs."""
        wanted = wanted_nodes(index, objects, self._topology.rank, self._topology.world, options)
        self._cache.leave(f"nodes.{self._topology.local}", pack_numbers(wanted, len(index.nodes)))

    def fetch_share(self, index: CheckpointIndex) -> None:
        """Read this rank's share of what the ranks of the node have asked for. Missing, Damaged, StoreError."""
        for number in self._asked(index)[self._topology.local :: len(self._topology.ranks)]:
            self._fetch(index, number)

    def manifest(self, index: CheckpointIndex) -> Manifest:
        """Return what the fetched node manifests say; the same on all ranks of the node. Damaged."""
        return assemble_manifest(
            index,
            {number: parse_node(index, number, self._cache.message(f"node.{number}")) for number in self._asked(index)},
        )

    def _asked(self, index: CheckpointIndex) -> list[int]:
        if len(index.nodes) == 1:
            return [0]
        return unpack_numbers([self._cache.message(f"nodes.{local}") for local in range(len(self._topology.ranks))])

    def _fetch(self, index: CheckpointIndex, number: int) -> None:
        # Every rank of the node parses it, and finds out whether it is good.
        self._cache.leave(f"node.{number}", self._read(index.nodes[number].name))


def wanted_nodes(
    index: CheckpointIndex, objects: Mapping[str, object], rank: int, world: int, options: RestoreOptions
) -> set[int]:
    """Return the nodes of a checkpoint that hold something of what a rank's objects take.

    Args:
        index: Of the checkpoint.
        objects: What is restored, by name.
        rank: Of this process.
        world: How many ranks restore.
        options: Of the restore.
    """
    found = index.nodes_of_ranks([rank]) if world == index.world else set()
    names = rename_leaves({name: name for name in index.tensors}, options.rename)
    empty = rename_manifest(assemble_manifest(index, {}), options.rename)
    everything = Saved.of(empty, allow_pickle=options.allow_pickle, casts=options.casts)
    wanted: dict[str, Sequence[Region] | None] = {}
    for kind in bind_kinds(objects, rank=rank):
        if kind.prefix.startswith(f"{RANK}."):
            continue  # on the node of that rank
        saved = everything.below(kind.prefix)
        if not saved:
            continue
        for name, target in kind.targets(saved, []).items():
            wanted[names[name]] = _list_regions(target)
    return found | index.nodes_of(wanted)


def _list_regions(target: torch.Tensor) -> list[Region] | None:
    """List which of a tensor's elements are here, as regions; None for all of them, or where that is not known."""
    if not is_dtensor(target):
        return None
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if any(type(each) not in (Shard, Replicate) for each in target.placements):
        return None
    sizes, offsets = compute_local_shape_and_global_offset(target.shape, target.device_mesh, target.placements)
    if 0 in sizes:
        return []
    return [tuple((offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))]
