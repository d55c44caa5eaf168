"""Answers of the API server, and of what stands in its place."""

from __future__ import annotations

import json

import pytest

from everstep_operator.cluster.api_answer import decode_body


@pytest.mark.parametrize("text", ['{"a": [1, 2.5, null, "\\u00e9"]}', '"\\ud800"', '{"a": 1e400}', f"[{10**30}]"])
def test_a_body_is_read_as_the_standard_library_reads_it(text: str) -> None:
    assert decode_body(text.encode()) == json.loads(text)


@pytest.mark.parametrize("data", [b"<html>", b"[1, 2", b"\xff", b'{"a": 1} {"b": 2}'])
def test_what_is_no_json_is_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 (of JSON, or of UTF-8: only the type counts)
        decode_body(data)
