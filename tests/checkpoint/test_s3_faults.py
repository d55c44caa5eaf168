"""A fault at each request of a save of two ranks and of a restore: the newest good checkpoint is found, or an error is.

Once, as networks and servers do (repeating it is enough), and from that request on, as a store does that is gone.
"""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import urlsplit

import pytest

from everstep.checkpoint.errors import CheckpointError, StoreError
from everstep.checkpoint.store.retry import Retry
from everstep.checkpoint.store.s3 import S3Store
from tests.checkpoint.builders import Training, is_good, key, load
from tests.checkpoint.faults import Chooser, Fault, FaultProxy, from_nth, nth
from tests.checkpoint.s3_server import BUCKET

pytestmark = pytest.mark.integration

TRAINING = Training()
EXECUTED = {Fault.LATE, Fault.LOST, Fault.CUT}
COMMIT = 10  # the number of the request that commits

How = Callable[[int, Fault], Chooser]
each_fault = pytest.mark.parametrize("fault", list(Fault), ids=lambda fault: fault.name)


def opened(url: str, tries: int) -> S3Store:
    return S3Store(url, read_timeout=0.5, retry=Retry(tries=tries, first=0.001, longest=0.01))


@pytest.fixture
def disturbed_url(s3_url: str, proxy: FaultProxy) -> str:
    """The same place, through the proxy."""
    return f"s3://{BUCKET}{urlsplit(s3_url).path}?endpoint={proxy.endpoint}"


def requests_of(proxy: FaultProxy, call: Callable[[], object]) -> int:
    proxy.begin()
    call()
    return len(proxy.requests)


@each_fault
def test_a_save_outlives_one_fault_at_each_of_its_requests(
    s3_url: str, disturbed_url: str, proxy: FaultProxy, fault: Fault
) -> None:
    direct, disturbed = opened(s3_url, tries=1), opened(disturbed_url, tries=3)
    TRAINING.save(disturbed, key(0))
    requests = requests_of(proxy, lambda: TRAINING.save(disturbed, key(1)))
    # Of two nodes a part, a node manifest and an announcement; the listing of these, and both read; the index, the
    # hint; and three that read the checkpoint again.
    assert requests == 14
    for number in range(1, requests + 1):
        newest = key(1 + number)
        proxy.begin(nth(number, fault))
        TRAINING.save(disturbed, newest)
        assert len(proxy.requests) >= number
        loaded = load(direct)
        assert loaded.key == newest
        assert loaded.fell_back == ()
        assert is_good(TRAINING, loaded)


@each_fault
def test_a_save_into_a_store_that_goes_away_leaves_the_last_good_one(
    s3_url: str, disturbed_url: str, proxy: FaultProxy, fault: Fault
) -> None:
    direct, disturbed = opened(s3_url, tries=1), opened(disturbed_url, tries=2)
    TRAINING.save(disturbed, key(0))
    requests = requests_of(proxy, lambda: TRAINING.save(disturbed, key(1)))
    last, failed = key(1), 0
    for number in range(1, requests + 1):
        now = key(1 + number)
        proxy.begin(from_nth(number, fault))
        try:
            TRAINING.save(disturbed, now)
            possible = {now}
        except CheckpointError:
            failed += 1
            # An answer that never came leaves it open whether the commit was executed; if it was, it is whole.
            possible = {last, now} if fault in EXECUTED else {now} if number > COMMIT else {last}
        loaded = load(direct)
        assert loaded.key in possible
        assert loaded.fell_back == ()
        assert is_good(TRAINING, loaded)
        last = loaded.key
    assert failed


@each_fault
@pytest.mark.parametrize("how", [nth, from_nth], ids=["once", "for good"])
def test_a_restore_gives_the_newest_or_an_error(
    s3_url: str, disturbed_url: str, proxy: FaultProxy, fault: Fault, how: How
) -> None:
    direct = opened(s3_url, tries=1)
    for step in (10, 20):
        TRAINING.save(direct, key(step))
    store = opened(disturbed_url, tries=2)
    requests = requests_of(proxy, lambda: load(store))
    for number in [*range(1, 8), *range(8, requests, 25), requests]:
        proxy.begin(how(number, fault))
        if how is from_nth:
            with pytest.raises(StoreError):
                load(store)
            continue
        loaded = load(store)
        assert loaded.key == key(20)
        assert loaded.fell_back == ()
        assert is_good(TRAINING, loaded)
