"""Placement of copies: no node keeps its own, every node keeps one, in another failure domain if there is one."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from everstep.checkpoint.peers.placement import choose_copy_keepers

domains = st.lists(st.sampled_from("abcdefgh"), min_size=2, max_size=24)


@given(domains)
def test_everybody_keeps_one_copy_and_nobody_their_own(domains: list[str]) -> None:
    found = choose_copy_keepers(domains)
    assert sorted(keeper for keeper in found if keeper is not None) == list(range(len(domains)))
    assert all(keeper != node for node, keeper in enumerate(found))


@given(domains)
def test_as_many_copies_as_can_be_are_in_another_domain(domains: list[str]) -> None:
    found = choose_copy_keepers(domains)
    inside = sum(domains[node] == domains[keeper] for node, keeper in enumerate(found) if keeper is not None)
    largest = max(Counter(domains).values())
    # The nodes outside the largest domain can keep one copy each; what it has more of stays inside.
    assert inside == max(0, largest - (len(domains) - largest))


@given(domains, st.permutations("abcdefgh"))
def test_what_domains_are_called_does_not_count(domains: list[str], names: list[str]) -> None:
    """So a machine that is replaced, by one in the same rack or where each is a domain of its own, changes nothing."""
    renamed = dict(zip("abcdefgh", names, strict=True))
    assert choose_copy_keepers([renamed[domain] for domain in domains]) == choose_copy_keepers(domains)


def test_with_a_domain_for_each_node_it_is_the_next_one() -> None:
    assert choose_copy_keepers(["m0", "m1", "m2"]) == (1, 2, 0)
    assert choose_copy_keepers(["rack", "rack"]) == (1, 0)
    assert choose_copy_keepers(["a", "a", "b", "b"]) == (2, 3, 0, 1)


def test_the_only_node_has_nobody() -> None:
    assert choose_copy_keepers(["a"]) == (None,)
    assert choose_copy_keepers([]) == ()
