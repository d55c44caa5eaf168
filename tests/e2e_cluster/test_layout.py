"""Nodes differ where they must: addresses, ranges, names of links; and in capacity and zone where tests need it."""

from __future__ import annotations

import ipaddress

import pytest

from e2e.cluster.network import HOST_ADDRESS, MAX_NODES, Place
from e2e.cluster.node import capacity_type, labels

LONGEST_LINK_NAME = 15


def test_every_place_is_its_own() -> None:
    places = [Place(index) for index in range(1, MAX_NODES + 1)]
    for attribute in ("namespace", "link", "address", "pod_cidr"):
        values = {getattr(place, attribute) for place in places}
        assert len(values) == MAX_NODES
    assert HOST_ADDRESS not in {place.address for place in places}
    assert all(len(place.link) <= LONGEST_LINK_NAME for place in places)
    assert all(ipaddress.ip_network(place.pod_cidr) for place in places)


@pytest.mark.parametrize("count", range(2, 12))
def test_from_two_nodes_on_there_is_one_of_each_capacity_type(count: int) -> None:
    types = [capacity_type(index, count) for index in range(1, count + 1)]
    assert set(types) == {"on-demand", "spot"}
    assert types[0] == "on-demand"


def test_three_nodes_are_two_on_demand_and_one_spot() -> None:
    assert [capacity_type(index, 3) for index in (1, 2, 3)] == ["on-demand", "on-demand", "spot"]


def test_a_single_node_is_on_demand() -> None:
    assert capacity_type(1, 1) == "on-demand"


def test_neighbours_lie_in_different_zones() -> None:
    assert labels(1, 3)["topology.kubernetes.io/zone"] != labels(2, 3)["topology.kubernetes.io/zone"]
