"""The leader's links: how often it dials whom."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from everstep.agent.leader import node_links
from everstep.agent.leader.node_links import Links

from .fakes import TOKEN, local, until

NAME, V4, V6 = "algo-2.nowhere:8470", "10.0.0.2:8470", "[fd00::2]:8470"


@pytest.mark.parametrize(("address", "longest"), [(NAME, 30.0), (V4, 2.0), (V6, 2.0)])
async def test_name_servers_are_asked_seldom_for_pods_that_are_long_in_coming(
    monkeypatch: pytest.MonkeyPatch, address: str, longest: float
) -> None:
    """A thousand pods may wait for their machines for hours, and each try is a dozen questions."""
    waits: list[float] = []
    enough = asyncio.Event()

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 20:
            enough.set()
            await asyncio.Event().wait()

    async def fails(links: Links, *dial: Any) -> None:
        return None

    monkeypatch.setattr(Links, "_try", fails)
    monkeypatch.setattr(node_links, "asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": sleep}))
    listener: Any = SimpleNamespace(keep=asyncio.ensure_future)
    links = Links(local(2), TOKEN, listener)
    links.dial(1, address)
    await until(enough.is_set)
    links.dial(1, "")
    assert waits[0] < 0.2
    assert 0.75 * longest <= waits[-1] <= 1.25 * longest
