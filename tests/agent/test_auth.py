"""MACs and nonces: what the operator and the agent compute alike, once each."""

from __future__ import annotations

from pathlib import Path

import pytest

from everstep.agent.wire import auth


def test_a_nonce_is_good_once() -> None:
    store = auth.NonceStore()
    nonce = store.issue(0.0)
    assert store.take(nonce, 1.0)
    assert not store.take(nonce, 1.0)


def test_a_nonce_expires() -> None:
    store = auth.NonceStore()
    assert not store.take(store.issue(0.0), 30.0)
    assert len(store) == 0


def test_a_nonce_knows_its_age_until_it_is_taken() -> None:
    store = auth.NonceStore()
    nonce = store.issue(100.0)
    assert (store.age(nonce, 117.0), store.age("0" * 32, 117.0)) == (17.0, 0.0)
    assert store.take(nonce, 117.0)
    assert store.age(nonce, 118.0) == 0.0


def test_open_nonces_are_bounded_and_the_oldest_goes_first() -> None:
    store = auth.NonceStore(limit=3)
    first, *others = [store.issue(0.0) for _ in range(4)]
    assert len(store) == 3
    assert not store.take(first, 0.0)
    assert all(store.take(nonce, 0.0) for nonce in others)


def test_every_part_of_a_request_is_covered() -> None:
    args = (b"token", "POST", "/v1/stop", "n", "c", b"body")
    mac = auth.request_mac(*args)
    changed = (b"nekot", "GET", "/v1/stop?x", "m", "d", b"ydob")
    for i, value in enumerate(changed):
        other = list(args)
        other[i] = value
        assert auth.request_mac(*other) != mac  # type: ignore[arg-type]


def test_a_frame_can_be_neither_repeated_nor_reflected() -> None:
    macs = {auth.frame_mac(b"key", d, n, b"{}") for d in (auth.TO_AGENT, auth.TO_LEADER) for n in range(3)}
    assert len(macs) == 6


def test_comparison_survives_what_a_stranger_sends() -> None:
    assert not auth.macs_equal("00", "\udcff\xe9")
    assert auth.macs_equal("00", "00")


def test_a_short_token_is_refused(tmp_path: Path) -> None:
    (tmp_path / "token").write_bytes(b"secret")
    with pytest.raises(ValueError, match="at least 16 bytes"):
        auth.read_token(tmp_path / "token")


def test_the_job_token_differs_by_template_epoch() -> None:
    assert auth.job_token(b"key", "uid", 1) != auth.job_token(b"key", "uid", 2)
    assert len(auth.job_token(b"key", "uid", 1)) == 32
