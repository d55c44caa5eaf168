"""Strategic merge, as kubectl users expect it."""

from __future__ import annotations

import pytest

from everstep_operator.plan.overlay import merge_overlay


def test_objects_merge_field_by_field() -> None:
    assert merge_overlay({"a": {"x": 1, "y": 2}}, {"a": {"y": 3}, "b": 4}) == {"a": {"x": 1, "y": 3}, "b": 4}


def test_named_things_merge_by_name() -> None:
    base = {"containers": [{"name": "trainer", "image": "i", "env": [{"name": "A", "value": "1"}]}]}
    over = {"containers": [{"name": "x"}, {"name": "trainer", "env": [{"name": "A", "valueFrom": {}}, {"name": "B"}]}]}
    assert merge_overlay(base, over) == {
        "containers": [
            {"name": "trainer", "image": "i", "env": [{"name": "A", "valueFrom": {}}, {"name": "B"}]},
            {"name": "x"},
        ]
    }


def test_tolerations_are_added() -> None:
    assert merge_overlay({"tolerations": [{"key": "a"}]}, {"tolerations": [{"key": "b"}, {"key": "a"}]}) == {
        "tolerations": [{"key": "a"}, {"key": "b"}]
    }


def test_plain_lists_are_replaced() -> None:
    assert merge_overlay({"drop": ["ALL"]}, {"drop": ["NET_RAW"]}) == {"drop": ["NET_RAW"]}


def test_null_removes() -> None:
    assert merge_overlay({"a": 1, "b": 2}, {"a": None}) == {"b": 2}


def test_the_base_stays_as_it_was() -> None:
    base = {"a": {"x": 1}, "tolerations": [1]}
    merge_overlay(base, {"a": {"x": 2}, "tolerations": [2]})
    assert base == {"a": {"x": 1}, "tolerations": [1]}


@pytest.mark.parametrize("path", ["/opt/ml/model/", "/opt//ml/model", "//opt/ml/model", "/opt/ml/./model"])
def test_a_mount_point_is_one_however_it_is_written(path: str) -> None:
    base = {"volumeMounts": [{"name": "ours", "mountPath": "/opt/ml/model"}]}
    assert merge_overlay(base, {"volumeMounts": [{"name": "theirs", "mountPath": path}]}) == {
        "volumeMounts": [{"name": "theirs", "mountPath": "/opt/ml/model"}]
    }


def test_a_mount_point_that_is_not_ours_stays_as_it_is_written() -> None:
    for path in ("/data/", "data", ""):
        over = {"volumeMounts": [{"name": "theirs", "mountPath": path}]}
        assert merge_overlay({"volumeMounts": []}, over) == over


@pytest.mark.parametrize(
    ("field", "items"),
    [
        ("topologySpreadConstraints", [
            {"topologyKey": "zone", "maxSkew": 1, "whenUnsatisfiable": "DoNotSchedule"},
            {"topologyKey": "zone", "maxSkew": 2, "whenUnsatisfiable": "ScheduleAnyway"},
        ]),
        ("ports", [{"containerPort": 53, "protocol": "UDP"}, {"containerPort": 53, "protocol": "TCP"}]),
        ("hostAliases", [{"ip": "10.0.0.1", "hostnames": ["a"]}, {"ip": "10.0.0.1", "hostnames": ["b"]}]),
    ],
)  # fmt: skip
def test_items_of_the_user_s_own_are_not_merged_with_each_other(field: str, items: list[dict[str, object]]) -> None:
    assert merge_overlay({}, {field: items}) == {field: items}
    assert merge_overlay({field: [items[0]]}, {field: items}) == {field: items}
