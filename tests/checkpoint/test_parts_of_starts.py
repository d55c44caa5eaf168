"""A part in the memory of a node is the checkpoint's own by its bytes, not by its name."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace

import pytest

pytest.importorskip("torch")

from everstep.checkpoint.format.manifest import Chunk, Shard
from everstep.checkpoint.restore.part_files import PartFiles, hold_slots
from tests.checkpoint.test_slot_marks import crashed
from tests.checkpoint.writers import Site

pytestmark = pytest.mark.torch


def test_a_verified_part_of_another_start_is_not_taken_for_one_of_the_checkpoint(site: Site) -> None:
    """Its name, size and header are the same, and its mark holds: of what its own start has saved."""
    _, slot = crashed(site)
    manifest = slot.manifest()
    assert manifest is not None

    def change(chunk: Chunk) -> Chunk:
        return replace(chunk, sum=f"{int(chunk.sum, 16) ^ 1:0{len(chunk.sum)}x}") if chunk.part == 1 else chunk

    tensors = {
        name: replace(
            tensor,
            shards=tuple(
                Shard(shard.offsets, shard.sizes, tuple(map(change, shard.chunks))) for shard in tensor.shards
            ),
        )
        for name, tensor in manifest.tensors.items()
    }
    for other, kept in ((manifest, [True, True]), (replace(manifest, tensors=tensors), [True, False])):
        with ExitStack() as stack:
            files = PartFiles(other, site.store)
            files.adopt(hold_slots(slot.path.parent, manifest.key, stack), stack)
            assert [files.is_verified(number) for number in (0, 1)] == kept
