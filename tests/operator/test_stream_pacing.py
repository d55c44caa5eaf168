"""A busy stream is read in volleys, which costs less than each event alone; a quiet one is read as it comes."""

from __future__ import annotations

import asyncio
import itertools
import time

import pytest
from aiohttp import ClientResponse, web
from aiohttp.test_utils import TestServer
from kubernetes.aio.client import Configuration

from everstep_operator.cluster.client import Client
from everstep_operator.cluster.resources import PODS
from everstep_operator.cluster.stream_pacing import GATHER_SECONDS, StreamPacer, gather_events


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def read_often(clock: Clock, count: int, every_seconds: float) -> list[bool]:
    pacer, found = StreamPacer(clock), []
    for _ in range(count):
        clock.now += every_seconds
        found.append(pacer.note(1))
    return found


def test_events_of_a_small_job_are_read_as_they_come(clock: Clock) -> None:
    assert not any(read_often(clock, count=20, every_seconds=0.0)), "four pods with five events each, at once"


def test_a_few_events_a_second_are_read_as_they_come_for_ever(clock: Clock) -> None:
    assert not any(read_often(clock, count=10_000, every_seconds=0.025))


def test_the_start_of_many_pods_is_read_in_volleys(clock: Clock) -> None:
    found = read_often(clock, count=4000, every_seconds=0.005)
    assert found.index(True) < 50
    assert all(found[50:])


def test_a_stream_is_quiet_again_soon_after_however_much_it_has_told(clock: Clock) -> None:
    pacer = StreamPacer(clock)
    assert pacer.note(100_000)
    clock.now += 0.5
    assert not pacer.note(1)


async def test_no_event_of_a_busy_stream_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []

    async def gather(response: ClientResponse) -> None:
        reads.append(time.monotonic())
        await gather_events(response)

    async def tell(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for number in range(400):
            await response.write(b"%d\n" % number)
            await asyncio.sleep(0.001)
        return response

    monkeypatch.setattr("everstep_operator.cluster.client.gather_events", gather)
    app = web.Application()
    app.router.add_get("/{path:.*}", tell)
    async with TestServer(app) as server:
        configuration = Configuration()
        configuration.host = str(server.make_url("")).rstrip("/")
        client = Client(configuration)
        told = [int(line) async for line in client.watch(PODS, version=1)]
        await client.close()
    assert told == list(range(400)), "the end of the stream comes too"
    assert 5 <= len(reads) <= 200
    assert all(after - before >= 0.9 * GATHER_SECONDS for before, after in itertools.pairwise(reads))
