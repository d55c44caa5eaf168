"""The order of samples is a function of the seed and the step: no restart and no number of ranks changes it."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.data import Sampler
from everstep.data.order import shuffle_positions

# Large enough for every width of the network that small sizes have, and for walking on in each.
sizes = st.integers(1, 100)
seeds = st.integers(0, 2**63) | st.none()


def sequence(size: int, batch: int, world: int, steps: range, seed: int | None) -> list[int]:
    """All samples of these steps, as the ranks see them together."""
    samplers = [Sampler(size, global_batch=batch, seed=seed, rank=rank, world=world) for rank in range(world)]
    return [index for step in steps for sampler in samplers for index in sampler.batch(step)]


@given(sizes, st.integers(0, 2**63), st.integers(0, 1000))
def test_every_epoch_has_every_sample_once(size: int, seed: int, epoch: int) -> None:
    order = shuffle_positions(np.arange(size, dtype=np.uint64), size, seed, epoch)
    assert sorted(order.tolist()) == list(range(size))


@given(sizes, st.integers(1, 4), seeds, st.integers(0, 10**6), st.sampled_from([2, 3, 4, 6, 12]))
def test_the_sequence_is_the_same_at_any_number_of_ranks(
    size: int, per_rank: int, seed: int | None, start: int, world: int
) -> None:
    steps = range(start, start + 5)
    batch = 12 * per_rank
    assert sequence(size, batch, world, steps, seed) == sequence(size, batch, 1, steps, seed)


@given(sizes, st.integers(1, 50), seeds)
def test_no_sample_is_repeated_or_left_out_at_the_end_of_an_epoch(size: int, batch: int, seed: int | None) -> None:
    seen = sequence(size, batch, 1, range(-(-3 * size // batch)), seed)
    for epoch in range(3):
        assert sorted(seen[epoch * size : (epoch + 1) * size]) == list(range(size))


@given(
    sizes,
    seeds,
    st.lists(
        st.tuples(st.integers(0, 9), st.integers(0, 5), st.sampled_from([1, 2, 4]), st.integers(1, 3)),
        min_size=1,
        max_size=5,
    ),
)
def test_restarts_at_other_numbers_of_ranks_and_batches_neither_replay_nor_skip(
    size: int, seed: int | None, runs: list[tuple[int, int, int, int]]
) -> None:
    """Each run trains some steps while its loader reads ahead, dies, and the next one resumes from its state."""
    state = None
    seen: list[int] = []
    for steps, ahead, world, per_rank in runs:
        samplers = [
            Sampler(size, global_batch=4 * per_rank, seed=seed, rank=rank, world=world) for rank in range(world)
        ]
        for sampler in samplers:
            if state is not None:
                sampler.load_state_dict(state)
        first = samplers[0].step
        read = [list(itertools.islice(iter(sampler), steps + ahead)) for sampler in samplers]
        seen += [index for step in range(steps) for own in read for index in own[step]]
        states = [sampler.state_at(first + steps) for sampler in samplers]
        assert all(each == states[0] for each in states), "plain values that ranks disagree about cannot be saved"
        state = states[0]
    assert seen == sequence(size, 1, 1, range(len(seen)), seed)


def test_the_order_is_the_same_in_every_version() -> None:
    first, second = sequence(10, 10, 1, range(1), seed=7), sequence(10, 10, 1, range(1, 2), seed=7)
    assert first == [3, 0, 2, 7, 4, 6, 9, 5, 8, 1]
    assert second == [4, 1, 8, 0, 6, 5, 3, 9, 2, 7]


def test_epochs_and_seeds_shuffle_differently_and_no_sample_is_preferred() -> None:
    first = Counter(sequence(6, 6, 1, range(1), seed)[0] for seed in range(1200))
    assert all(150 < count < 250 for count in first.values()), first
    orders = {tuple(sequence(100, 100, 1, range(epoch, epoch + 1), seed)) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25


def test_a_billion_samples_start_at_once() -> None:
    sampler = Sampler(10**9, global_batch=8, rank=0, world=1)
    assert len(set(sampler.batch(10**8))) == 8


def test_what_cannot_be_right_is_refused() -> None:
    with pytest.raises(ValueError, match=r"64 cannot be shared equally by 3 ranks"):
        Sampler(100, global_batch=64, rank=0, world=3)
    state = Sampler(100, global_batch=4, rank=0, world=1).state_at(3)
    with pytest.raises(ValueError, match=r"size is 99, it was 100 when saved"):
        Sampler(99, global_batch=4, rank=0, world=1).load_state_dict(state)


def test_it_ends_where_it_is_told() -> None:
    sampler = Sampler(10, global_batch=2, stop=4, rank=0, world=1)
    sampler.load_state_dict(sampler.state_at(3))
    assert (len(sampler), len(list(sampler))) == (1, 1)


def test_steps_beyond_what_an_iteration_has_given_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    """As where a script iterates anew in each epoch, or gives the sampler of an evaluation to restore()."""
    sampler = Sampler(8, global_batch=4, stop=2, rank=0, world=1)
    for step in (1, 2):
        list(sampler)
        sampler.state_at(step)
    assert not caplog.records
    list(sampler)
    for step in (3, 4):
        sampler.state_at(step)
    (record,) = caplog.records
    assert "3 steps are trained, and this sampler has given batches of 2" in record.getMessage()


def test_steps_that_follow_an_iteration_are_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    sampler = Sampler(8, global_batch=4, rank=0, world=1)
    batches = iter(sampler)
    for step in range(1, 9):
        next(batches)
        sampler.state_at(step)
    resumed = Sampler(8, global_batch=4, rank=0, world=1)
    next(iter(resumed))
    resumed.load_state_dict(sampler.state_at(6))
    assert resumed.state_dict()["step"] == 6
    for step, _ in zip(range(7, 12), resumed, strict=False):
        resumed.state_at(step)
    assert not caplog.records
