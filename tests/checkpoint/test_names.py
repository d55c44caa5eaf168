"""A name says where its leaf belongs: any nested state comes back from names and leaves alone."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.checkpoint.state.names import nest_leaves, walk_leaves


class Leaf:
    """Stands for a tensor: what walk() looks for."""


def is_leaf(value: object) -> bool:
    return isinstance(value, Leaf)


scalars = st.none() | st.booleans() | st.integers() | st.text()
states = st.recursive(
    scalars | st.builds(Leaf),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=4) | st.sampled_from(["a.b", "a/b", "%2E", "#1", "[0]", "(0)", "%"]), inner)
        | st.dictionaries(st.integers(), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(states)
def test_any_nested_state_comes_back_from_its_names(state: Any) -> None:
    leaves = list(walk_leaves(state, is_leaf))
    assert len({name for name, _ in leaves}) == len(leaves)
    assert nest_leaves(dict(leaves)) == state


@given(states)
def test_no_leaf_that_is_looked_for_stays_inside_a_value(state: Any) -> None:
    def holds(value: Any) -> bool:
        children = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
        return any(is_leaf(each) or holds(each) for each in children)

    assert not any(holds(leaf) for _, leaf in walk_leaves(state, is_leaf))


def test_names_read_as_paths() -> None:
    state = {"layers": {"0": {"w": 1}}, "ema": [Leaf(), Leaf()], "a.b/c": 2, "": 3, "by id": {7: Leaf()}}
    assert [name for name, _ in walk_leaves(state, is_leaf)] == [
        "layers.0.w", "ema.[0]", "ema.[1]", "a%2Eb%2Fc", "%", "by id.#7",
    ]  # fmt: skip


def test_names_that_fit_no_state_are_refused() -> None:
    for leaves in ({"a": 1, "a.b": 2}, {"a.[0]": 1, "a.[2]": 2}, {"a.[0]": 1, "a.b": 2}):
        with pytest.raises(ValueError, match=r"name|item|kinds"):
            nest_leaves(leaves)
