"""The number of pods that a quota can admit is read from the API server's message, and from nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep_operator.plan.quota import admitted_at_most

HEAD = 'pods "digits-3" is forbidden: exceeded quota: '


@pytest.mark.parametrize(
    ("message", "pods"),
    [
        ("team, requested: pods=1, used: pods=4, limited: pods=4", 4),
        ("team, requested: requests.nvidia.com/gpu=8, used: requests.nvidia.com/gpu=8, "
         "limited: requests.nvidia.com/gpu=20", 2),
        ("team, requested: limits.memory=16Gi,requests.cpu=500m, used: limits.memory=0,requests.cpu=4, "
         "limited: limits.memory=1Ti,requests.cpu=4", 8),
        ("team, requested: pods=1, used: pods=0, limited: pods=0", 0),
        ("team, requested: pods=0, used: pods=9, limited: pods=4", None),
        ("team, requested: pods=many, used: pods=9, limited: pods=4", None),
        ("team, requested: pods=1, used: pods=9, limited: cpu=4", None),
        ("team", None),
    ],
)  # fmt: skip
def test_as_many_as_the_limit_holds_of_what_one_pod_requests(message: str, pods: int | None) -> None:
    assert admitted_at_most(HEAD + message) == pods
    assert admitted_at_most(f"2 of 4 pods fitted in: {HEAD}{message}") == pods


@pytest.mark.parametrize("kind", ["services", "secrets", "configmaps"])
def test_a_limit_of_other_objects_tells_nothing_of_pods(kind: str) -> None:
    text = f'{kind} "digits" is forbidden: exceeded quota: team, requested: {kind}=1, used: {kind}=1, limited: {kind}=1'
    assert admitted_at_most(text) is None


@given(st.text())
def test_odd_words_raise_nothing(text: str) -> None:
    assert admitted_at_most(text) is None
    admitted_at_most(f"{HEAD}q, requested: {text}, used: a, limited: {text}")
