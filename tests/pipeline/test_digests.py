"""By a few numbers of their batches, ranks see whether these have the same samples."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")
import torch

from everstep.pipeline.engine.digests import BatchDigest, digest_batch
from everstep.pipeline.engine.microbatch import Parts

pytestmark = pytest.mark.torch


def digest(batch: Any, targets: Any = None) -> BatchDigest:
    return digest_batch(batch, targets, 0)


def test_images_that_are_black_at_their_borders_differ_by_what_is_within() -> None:
    images = torch.zeros(64, 1, 28, 28)
    images[:, :, 8:20, 8:20] = torch.rand(64, 1, 12, 12)
    assert digest({"x": images}).differs(digest({"x": images[torch.randperm(64)]}))


@pytest.mark.parametrize("length", [512, 2048, 4096, 4099])
def test_samples_that_begin_and_end_alike_differ_by_what_is_between(length: int) -> None:
    ids = torch.zeros(64, length, dtype=torch.int64)
    ids[:, length // 4 : length // 2] = torch.randint(1, 100, (64, length // 2 - length // 4))
    assert digest({"ids": ids}).differs(digest({"ids": ids[torch.randperm(64)]}))


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float32, torch.complex64]
)
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (32, 3, 64, 64)])
def test_how_numbers_lie_in_memory_makes_no_difference(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    values = (torch.rand(shape) * 200).to(dtype)
    back = tuple(reversed(range(values.dim())))
    turned = values.permute(back).contiguous().permute(back)
    assert not digest({"x": values}, values).differs(digest({"x": turned}, turned))
    if dtype.is_complex:
        assert not digest({"x": values.conj()}).differs(digest({"x": values.conj().resolve_conj()}))


def test_what_a_rank_was_not_given_is_not_compared() -> None:
    x, y = torch.rand(8, 4), torch.rand(8)
    assert not digest({"x": x}).differs(digest(None, y))
    assert not digest(None).differs(digest(ValueError("no batch"), y))
    assert not digest({"x": x, "scale": 2.0}, y).differs(digest({"x": None, "scale": 3.0}, y))


def test_a_tensor_whose_elements_cannot_be_had_is_not_compared() -> None:
    ragged = torch.nested.nested_tensor([torch.rand(2), torch.rand(3)])
    assert not digest(None, ragged).differs(digest(None, torch.rand(2, 3)))


def test_constants_beside_samples_hide_no_difference() -> None:
    x, mask = torch.rand(8, 4), torch.ones(8, 4)
    other = digest({"x": x.flip(0), "mask": mask}, ["a text"])
    assert digest({"x": x, "mask": mask}, ["a text"]).differs(other)


def test_targets_in_structures_and_batches_in_parts_are_compared() -> None:
    parts = [{"x": torch.rand(4, 2)} for _ in range(3)]
    targets = {"boxes": [torch.rand(2, 4), torch.rand(3, 4)], "labels": (torch.arange(2),)}
    others = {"boxes": targets["boxes"][::-1], "labels": targets["labels"]}
    assert not digest(Parts(parts), targets).differs(digest(Parts(parts), targets))
    assert digest(Parts(parts), targets).differs(digest(Parts(parts[::-1]), others))
