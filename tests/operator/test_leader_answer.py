"""A leader's answer is counted before it is parsed: one that no honest leader sends costs nearly nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.agent.leader.leader_state import MAX_HISTORY_TAILS
from everstep.agent.leader.members import GPUS_NAMED
from everstep.agent.leader.restart_allowance import MAX_HISTORY_ENTRIES
from everstep.agent.wire.protocol import MESSAGE_CHARS, TAIL_CHARS, TAIL_LINES, EndedGeneration
from everstep_operator.cluster import leader_answer
from everstep_operator.cluster.leader_answer import MAX_BYTES, ImplausibleAnswer, max_bytes, parse_answer


def honest(nodes: int, *, unclean: int, line: str) -> dict[str, Any]:
    """Make the fullest state that the agent's leader has: every list at its limit."""
    history = [
        EndedGeneration(1, number, "Application", 0, 0, 1, None, line, (line,) * TAIL_LINES, 1.0, 2.0)
        for number in range(MAX_HISTORY_ENTRIES)
    ]
    device = {"index": 1, "uuid": "GPU-" + "0" * 60, "name": "N" * 64, "problem": "p" * 128}
    return {
        "protocol": 1, "incarnation": "9f" * 8, "version": 17, "epoch": 2, "generation": 3, "phase": "stopping",
        "nodes": nodes, "joined": 0, "missing": list(range(nodes)),
        "unclean": [{"index": n, "uid": "u" * 36, "message": "m" * 1024} for n in range(unclean)],
        "gpus": {"models": {"N" * 60 + str(n): 8 for n in range(8)}, "unhealthy": 40, "devices": [device] * GPUS_NAMED},
        "ranksStartedAt": 1.0,
        "progress": {"step": 1, "metrics": {f"metric-{n}": 0.1 for n in range(32)}},
        "generationHistory": [
            entry.to_json(i >= MAX_HISTORY_ENTRIES - MAX_HISTORY_TAILS) for i, entry in enumerate(history)
        ],
        "outcome": None,
    }  # fmt: skip


LINES = ["x" * 400, '{"a": [1, 2, {"b": "\\""}]}, ' * 13, "错误：内存不足" * 50, "\x1b[31mfehler\x1b[0m" * 20]


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize(("nodes", "unclean"), [(1, 1), (200, 200), (800, 400), (2000, 200)])
def test_the_fullest_honest_answer_is_taken(nodes: int, unclean: int, line: str) -> None:
    state = honest(nodes, unclean=unclean, line=line)
    assert parse_answer(json.dumps(state, separators=(",", ":")).encode(), nodes) == state
    assert parse_answer(json.dumps(state).encode(), nodes) == state


@pytest.mark.parametrize("letter", ["错", "ж", "\x1b"])
@pytest.mark.parametrize("nodes", [1, 16, 2000])
def test_long_messages_in_any_script_are_taken_from_a_job_of_any_size(nodes: int, letter: str) -> None:
    """JSON spells such letters with six bytes each, in the message of each generation as in the log tails."""
    state = honest(nodes, unclean=1, line=letter * TAIL_CHARS)
    for entry in state["generationHistory"]:
        entry["message"] = letter * MESSAGE_CHARS
    assert parse_answer(json.dumps(state, separators=(",", ":")).encode(), nodes) == state


def test_eight_hundred_unclean_nodes_fit() -> None:
    state = honest(2000, unclean=800, line="x" * 100)
    assert parse_answer(json.dumps(state, separators=(",", ":")).encode(), 2000) == state


def test_the_bound_grows_with_the_nodes_up_to_a_mebibyte() -> None:
    assert max_bytes(1) < max_bytes(100) < max_bytes(2000) == MAX_BYTES


def filled(unit: bytes, size: int) -> bytes:
    return b"[" + b",".join([unit] * (size // (len(unit) + 1))) + b"]"


ODD = {
    "many lists": filled(b"[]", 1 << 19),
    "many objects": filled(b"{}", 1 << 19),
    "many numbers": filled(b"1", 1 << 19),
    "many strings": filled(b'""', 1 << 19),
    "many strings after an escaped quote": b'["\\\\\\"",' + filled(b'"\\\\"', 1 << 19) + b"]",
    "lists after a string that ends in a backslash": b'["\\\\",' + filled(b"[]", 1 << 18) + b',"\\\\"]',
    "deep lists": b"[" * 2000 + b"]" * 2000,
    "deep objects": b'{"a":' * 1000 + b"1" + b"}" * 1000,
    "deep and mixed": b'{"a":[' * 20 + b"]}" * 20,
    "brackets that do not match": b'{"a": [}',
    "a number as long as a book": b"[0." + b"1" * (400 << 10) + b"]",
    "spaces": b" " * (400 << 10) + b"1",
    "too large": b'["' + b"x" * MAX_BYTES + b'"]',
}


@pytest.mark.parametrize("name", ODD)
def test_an_odd_answer_is_rejected_unparsed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[bytes] = []
    monkeypatch.setattr(json, "loads", parsed.append)
    with pytest.raises(ImplausibleAnswer):
        parse_answer(ODD[name], 1)
    assert not parsed, "nothing of it was parsed"


@pytest.mark.parametrize("text", [b"", b"nonsense", b"{", b'"open', b"[1,]", b"\xff\xfe"])
def test_what_is_no_json_is_odd(text: bytes) -> None:
    with pytest.raises(ImplausibleAnswer):
        parse_answer(text, 1)


values = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False) | st.text(alphabet='"\\[]{},:a\n中😀'),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(alphabet='"\\[{'), inner, max_size=4),
    max_leaves=8,
)


def depth(value: Any) -> int:
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inside is None else 1 + max(map(depth, inside), default=0)


@given(values)
def test_small_values_are_taken_exactly_if_they_are_not_deep(value: Any) -> None:
    data = json.dumps(value).encode()
    if depth(value) > leader_answer.MAX_DEPTH:
        with pytest.raises(ImplausibleAnswer, match="deep"):
            parse_answer(data, 1)
    else:
        assert parse_answer(data, 1) == value
