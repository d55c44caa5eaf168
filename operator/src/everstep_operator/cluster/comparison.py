"""Compares the cache of one kind with a list: the repair of whatever a watch has not told.

A list may leave out objects that exist: an API server whose cache is not filled yet, or whose member of etcd has lost
data, answers so. A job that was taken for deleted would be looked after no more, and its lost pods not be replaced. So
what is missing on a list is asked for once more, a moment later.
"""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

from everstep_operator.cluster import errors
from everstep_operator.cluster.cache import Listing, ObjectCache
from everstep_operator.cluster.client import Client
from everstep_operator.cluster.pod_projection import decode_pod_list
from everstep_operator.cluster.resources import PODS, ApiResource
from everstep_operator.plan.labels import LABEL_JOB

# Any value of the one label that is ours alone: `app.kubernetes.io/managed-by` is what tools set as their own.
POD_SELECTOR = LABEL_JOB
MAX_TRIES = 3
CONFIRM_SECONDS = 1.0  # until a list is asked for again on which known objects were missing


class Comparison(NamedTuple):
    """The result of a list: the version at which it was taken, where a watch may go on, and what it has repaired."""

    version: int
    deleted: int = 0  # objects whose deletion nobody had told
    missed: int = 0  # objects of which a change was not told


async def compare_with_list(
    client: Client, resource: ApiResource, place: str | None, store: ObjectCache[Any]
) -> Comparison:
    """List one kind, and make its cache agree with the list.

    Args:
        client: Sends the requests.
        resource: The kind. Of pods, only those with the label of a job.
        place: The namespace; None for all of them.
        store: The cache of this kind.

    Raises:
        Gone: The pages were compacted away between two requests, several times in a row.
    """
    for attempt in range(MAX_TRIES):
        try:
            return await _compare_once(client, resource, place, store)
        except errors.Gone:
            if attempt == MAX_TRIES - 1:
                raise
    raise AssertionError("the last attempt raises")


async def _compare_once(
    client: Client, resource: ApiResource, place: str | None, store: ObjectCache[Any]
) -> Comparison:
    version, listing = await _take_list(client, resource, place, store)
    missed = listing.missed
    if listing.find_missing():
        await asyncio.sleep(CONFIRM_SECONDS)
        version, listing = await _take_list(client, resource, place, store)
        missed += listing.missed
    return Comparison(version, listing.finish(), missed)


async def _take_list(
    client: Client, resource: ApiResource, place: str | None, store: ObjectCache[Any]
) -> tuple[int, Listing[Any]]:
    """Store what is on a list, and return its version and what it has told."""
    known, listing, version = store.newest, None, 0
    options: dict[str, Any] = {"labels": POD_SELECTOR, "decode": decode_pod_list} if resource == PODS else {}
    async for page in client.list(resource, place, **options):
        if listing is None:
            version = page.version
            listing = store.listing(version, known, place)
        for item in page.items:
            listing.add(item)
        await asyncio.sleep(0)  # a page is some milliseconds: let others in between
    assert listing is not None, "a list has a first page"
    return version, listing
