"""Every element of every tensor is written once, by a rank that holds it; and planning grows as the ranks do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.checkpoint.planning import Planned, layout_of_rank, plan_ranks
from everstep.checkpoint.errors import CheckpointError
from everstep.checkpoint.format.manifest import HEADER, align_offset, get_itemsize
from everstep.checkpoint.save.layouts import LayoutNames, Ownership, RankLayout, box_of_span, span_of_box
from everstep.checkpoint.save.plan_coordinator import PlanCoordinator, RankMessages, fingerprint_model

Held = tuple[
    str, str, tuple[int, ...], tuple[int, ...], tuple[int, ...], Ownership
]  # name, dtype, shape, offsets, sizes


Written = tuple[str, str, tuple[int, ...], tuple[tuple[int, int], ...], Ownership]  # name, dtype, shape, box


def layout(held: Sequence[Held]) -> RankLayout:
    spans = [span_of_box(shape, offsets, sizes) for _, _, shape, offsets, sizes, _ in held]
    names = LayoutNames(
        tuple(name for name, *_ in held),
        tuple(dtype for _, dtype, *_ in held),
        tuple(shape for _, _, shape, *_ in held),
        tuple(claim for *_, claim in held),
    )
    return RankLayout(names, np.array(spans, np.int64).reshape(-1, 2))


def whole(name: str, *shape: int, dtype: str = "float32", claim: Ownership = Ownership.SHARED) -> Held:
    return name, dtype, shape, (0,) * len(shape), shape, claim


def box(name: str, shape: tuple[int, ...], *ranges: tuple[int, int]) -> Held:
    return (
        name,
        "float32",
        shape,
        tuple(low for low, _ in ranges),
        tuple(high - low for low, high in ranges),
        Ownership.SHARED,
    )


def plan(*ranks: Sequence[Held]) -> Planned:
    return plan_ranks(tuple(map(layout, ranks)))


def cut(extent: int, count: int) -> list[tuple[int, int]]:
    """As torch cuts a dimension: equal pieces, the last ones smaller or empty."""
    size = -(-extent // count)
    return [(min(i * size, extent), min((i + 1) * size, extent)) for i in range(count)]


@st.composite
def spread_tensors(draw: Any) -> list[list[Held]]:
    """Draw what each rank holds of some tensors: all of them, rows, boxes of a grid, or shards with replicas."""
    rows, columns = draw(st.sampled_from([(1, 1), (1, 2), (2, 2), (3, 2), (2, 3), (1, 5)]))
    ranks: list[list[Held]] = [[] for _ in range(rows * columns)]
    for number in range(draw(st.integers(1, 7))):
        name, dtype = f"t{number}", draw(st.sampled_from(["float32", "uint8", "bfloat16"]))
        shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
        kind = draw(st.sampled_from(["all", "some", "rows", "replicated rows", "grid", "own"]))
        some = draw(st.sets(st.integers(0, len(ranks) - 1), min_size=1))
        for rank, held in enumerate(ranks):
            i, j = divmod(rank, columns)
            ranges = [(0, extent) for extent in shape]
            if shape and kind in ("rows", "replicated rows"):
                count, mine = (len(ranks), rank) if kind == "rows" else (columns, j)
                ranges[0] = cut(shape[0], count)[mine]
            elif shape and kind == "grid":
                ranges[0], ranges[-1] = cut(shape[0], rows)[i], cut(shape[-1], columns)[j]
                if len(shape) == 1:
                    ranges[0] = cut(shape[0], columns)[j]
            if kind == "some" and rank not in some:
                continue
            claim = Ownership.OWN if kind == "own" else Ownership.SHARED
            sizes = tuple(high - low for low, high in ranges)
            held.append((name, dtype, shape, tuple(low for low, _ in ranges), sizes, claim))
    return ranks


def written(planned: Planned) -> list[list[Written]]:
    """Return what each rank writes."""
    found = []
    for share, own in zip(planned.shares, planned.layouts, strict=True):
        names = own.tensors
        boxes = []
        for i in share.writes:
            shape = names.shapes[i]
            ranges = () if 0 in shape else box_of_span(shape, *map(int, own.spans[i]))
            boxes.append((names.names[i], names.dtypes[i], shape, ranges, names.claims[i]))
        found.append(boxes)
    return found


@settings(max_examples=150, deadline=None)
@given(spread_tensors())
def test_every_element_is_written_once_by_a_rank_that_holds_it(ranks: list[list[Held]]) -> None:
    planned = plan(*ranks)
    counts: dict[str, Any] = {}
    for rank, boxes in enumerate(written(planned)):
        size = HEADER
        for name, dtype, shape, ranges, claim in sorted(boxes, key=lambda each: -bytes_of(each)):
            key = f"{rank} {name}" if claim is Ownership.OWN else name
            marks = counts.setdefault(key, np.zeros(shape, int))
            marks[tuple(slice(low, high) for low, high in ranges)] += 1
            size = align_offset(size) + bytes_of((name, dtype, shape, ranges, claim))
        assert planned.shares[0].sizes[rank] == size
    for rank, held in enumerate(ranks):
        for name, _, shape, _, _, claim in held:
            marks = counts.pop(f"{rank} {name}" if claim is Ownership.OWN else name, None)
            assert marks is None or (marks == 1).all(), name
            assert marks is not None or claim is not Ownership.OWN, name
            counts.setdefault(name, np.ones(shape, int))


def bytes_of(each: Written) -> int:
    _, dtype, shape, ranges, _ = each
    if 0 in shape:
        return 0
    return int(np.prod([high - low for low, high in ranges], dtype=int)) * get_itemsize(dtype)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 4))
def test_replicas_are_spread_as_well_as_a_greedy_assignment_can(sizes: list[int], world: int) -> None:
    """No rank has more than 4/3 of what the best of all assignments needs (Graham, 1969)."""
    tensors = [whole(f"t{i}", size, dtype="uint8") for i, size in enumerate(sizes)]
    loads = [sum(bytes_of(each) for each in boxes) for boxes in written(plan(*[tensors] * world))]
    best = min(
        max(sum(size for size, owner in zip(sizes, owners, strict=True) if owner == rank) for rank in range(world))
        for owners in product(range(world), repeat=len(sizes))
    )
    assert sum(loads) == sum(sizes)
    assert 3 * max(loads) <= 4 * best


def test_what_few_ranks_hold_leaves_what_all_hold_to_the_others() -> None:
    own = whole("rng", 100, claim=Ownership.OWN)
    shared = [whole(f"t{i}", 10) for i in range(8)]
    first, second = written(plan([own, *shared], shared))
    assert ([name for name, *_ in first], len(second)) == (["rng"], 8)


def test_a_tensor_that_is_to_come_from_one_rank_is_written_by_it_alone() -> None:
    follower = whole("mean", 4, claim=Ownership.ELSEWHERE)
    assert [[name for name, *_ in boxes] for boxes in written(plan([follower], [whole("mean", 4)], [follower]))] == [
        [], ["mean"], [],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([[box("w", (4, 4), (0, 2), (0, 4))], [box("w", (4, 4), (3, 4), (0, 4))]], [r"w\[2:3, 0:4\]", "no rank"]),
        ([[whole("w", 4, 4)], [box("w", (4, 4), (0, 4), (2, 4))]], [r"w\[0:4, 2:4\]", "rank 0 .* and rank 1 "]),
        ([[whole("w", 4)], [whole("w", 4)], [whole("w", 5)]], [r"\[4\] on rank 0 and .*\[5\] on rank 2", "PerRank"]),
        ([[whole("w", 4)], [whole("w", 4, dtype="bfloat16")]], ["float32 .* rank 0 and bfloat16 .* rank 1"]),
        ([[whole("w", 4, claim=Ownership.ELSEWHERE)]], ["w is held by no rank that could save it"]),
    ],
    ids=["a gap", "an overlap", "another shape", "another type", "nobody's"],
)
def test_ranks_that_do_not_fit_together_are_told_which_and_where(ranks: list[list[Held]], words: list[str]) -> None:
    for each in words:
        with pytest.raises(CheckpointError, match=each):
            plan(*ranks)


def refused(sums: list[list[int]], *ranks: Sequence[Held], values: Sequence[dict[str, str]] | None = None) -> str:
    """Return what all ranks are told when their replicas have these checksums."""
    coordinator = PlanCoordinator()
    given = values or [{}] * len(ranks)
    messages = [RankMessages(layout(held), each) for held, each in zip(ranks, given, strict=True)]
    wanted = coordinator.ask([each.head() for each in messages])
    answers = coordinator.share([each.details(want) for each, want in zip(messages, wanted, strict=True)])
    verdicts = coordinator.judge([RankMessages.sums(each) for each in sums]) if sums else [b""]
    assert len(set(verdicts)) == 1

    def end() -> None:
        for message, answer in zip(messages, answers, strict=True):
            message.share(answer)
        RankMessages.check(verdicts[-1])

    with pytest.raises(CheckpointError) as caught:
        end()
    return str(caught.value)


def test_replicas_with_other_bytes_are_refused_with_both_ranks() -> None:
    tensors = [whole("a", 2), whole("b", 2)]
    words = refused([[1, 2], [1, 2], [1, 3]], *[tensors] * 3)
    assert words.startswith("b differs between ranks that should hold the same: rank 0 has the checksum")
    assert all(part in words for part in ("rank 2 has 0000000000000003", "broadcast", "FromRank", "PerRank"))


def test_shards_are_compared_with_the_replicas_of_the_same_shard_only() -> None:
    halves = [box("w", (4,), (0, 2)), box("w", (4,), (2, 4))]
    one, other = [halves[0]], [halves[1]]
    assert "rank 1 has the checksum" in refused([[1], [2], [1], [9]], one, other, one, other)


def test_plain_values_that_differ_are_refused_with_both_ranks() -> None:
    held = [whole("a", 2)]
    words = refused([], held, held, held, values=[{"x": "1"}, {"x": "1", "y": "2"}, {"x": "3"}])
    assert "x is not the same value on rank 0 and on rank 2" in words


@pytest.mark.parametrize("spread", ["ddp", "fsdp", "hsdp"])
def test_planning_for_512_ranks_stays_small_and_grows_as_the_ranks_do(spread: Any) -> None:
    """2,200 tensors each take at most 200 MB on rank 0; four times the ranks are four times the bytes, not sixteen."""
    few = plan_ranks(tuple(layout_of_rank(spread, rank, 128, 2200) for rank in range(128)))
    many = plan_ranks(tuple(layout_of_rank(spread, rank, 512, 2200) for rank in range(512)), trace=True)
    assert many.peak_bytes < 200e6
    assert many.sent < 5 * few.sent
    assert many.answered < 512 * 8_000
    assert max(len(share.sizes) for share in many.shares) == 512
    names = many.layouts[0].tensors
    elements = np.zeros(len(names.names), np.int64)
    for share, own in zip(many.shares, many.layouts, strict=True):
        elements[share.writes] += own.spans[share.writes, 1] - own.spans[share.writes, 0] + 1
    assert elements.tolist() == [prod(shape) for shape in names.shapes]
    average = int((elements * names.widths).sum()) / 512
    assert max(many.shares[0].sizes) < average + 2 * 4096 * 1024 * 4, "the largest tensor cannot be divided"


def test_a_fingerprint_tells_models_apart_and_not_the_order_of_their_names() -> None:
    kinds = {"a": ("float32", (2, 3)), "b": ("float32", (3,))}
    assert fingerprint_model(kinds) == fingerprint_model(dict(reversed(kinds.items())))
    assert fingerprint_model(kinds) != fingerprint_model(kinds | {"b": ("float32", (4,))})


def test_a_layout_comes_back_from_its_bytes() -> None:
    names = layout([whole("a", 2, 3), whole("b", claim=Ownership.OWN), whole("c", 0, 2)]).tensors
    assert LayoutNames.decode(names.encoded) == names
    assert replace(names, claims=(Ownership.SHARED,) * 3).encoded != names.encoded
