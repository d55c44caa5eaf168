"""A deleted object stays deleted for the operator, in whatever order a real API server's answers and events come."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from e2e.cluster.controlplane import ControlPlane
from everstep_operator.app import Operator
from everstep_operator.cluster.cache import Key, resource_version
from everstep_operator.cluster.client import ListPage
from everstep_operator.cluster.resources import JOBS, NODES, PODS, POOLS, ApiResource
from tests.integration.inprocess import InjectedClient, Simulation, operator
from tests.integration.world import World, until


@contextlib.asynccontextmanager
async def watching_operator(
    control_plane: ControlPlane, world: World, resource: ApiResource, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Operator, InjectedClient]]:
    """An operator whose watch of `resource` has begun."""
    async with operator(control_plane.kubeconfig, world, resync_seconds=3600) as (made, client):
        heard, hear = set[ApiResource](), made.resync.note_event

        def hearing(which: ApiResource) -> None:
            heard.add(which)
            hear(which)

        monkeypatch.setattr(made.resync, "note_event", hearing)
        if resource == JOBS:
            await world.submit("first", suspend=True)

        async def has_begun() -> bool:
            # Streams of pods begin where the operator's list ends.
            return resource in heard or (resource == PODS and made.resync.done_at is not None)

        await until(has_begun, f"the watch of {resource.plural} has begun", 60)
        await made.queue.idle()
        yield made, client


async def test_a_pod_that_is_deleted_before_its_create_is_answered_is_made_again(
    control_plane: ControlPlane, still_world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event of the deletion is faster than the answer, and nothing tells of it again: no resync comes in time."""
    told: dict[str, int] = {}  # UIDs of deleted pods, and the version that the event of their deletion has
    created: list[Any] = []
    async with watching_operator(control_plane, still_world, PODS, monkeypatch) as (made, client):
        create, remove = client.create, made.cache.pods.remove

        def removing(key: Key, uid: str, *version: int) -> bool:
            told[uid] = version[0] if version else 0
            return remove(key, uid, *version)

        async def creating(resource: Any, namespace: str, body: Any, **options: Any) -> Any:
            answer = await create(resource, namespace, body, **options)
            if resource == PODS and not options.get("dry_run"):
                created.append(answer)
                if len(created) == 1:
                    await still_world.remove(answer)

                    async def told_of_it() -> bool:
                        return answer["metadata"]["uid"] in told

                    await until(told_of_it, "the watch tells of the deletion", 60)
            return answer

        monkeypatch.setattr(made.cache.pods, "remove", removing)
        monkeypatch.setattr(client, "create", creating)
        await still_world.submit("digits", numNodes=1)

        async def made_again() -> bool:
            return len(created) == 2

        await until(made_again, "the pod is made again", 60)
        first, second = created
        (there,) = await still_world.until_pods("digits", 1)
        assert there["metadata"]["uid"] == second["metadata"]["uid"]
        entry = made.cache.pods.get((still_world.namespace, "digits-0"))
        assert entry is not None
        assert entry.uid == second["metadata"]["uid"]
        # What tombstones rest on: the event of a deletion has a version of its own, above every state of the object.
        assert told[first["metadata"]["uid"]] > resource_version(first)


async def test_a_status_whose_answer_comes_after_the_jobs_deletion_leaves_no_job_behind(
    control_plane: ControlPlane, still_world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the operator would go on planning for it, and make its Service and its ConfigMaps again."""
    async with watching_operator(control_plane, still_world, JOBS, monkeypatch) as (made, client):
        jobs, key = made.cache.jobs, (still_world.namespace, "digits")
        answered = asyncio.Event()

        def delete_before_the_answer(write: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
            async def writing(*args: Any) -> Any:
                answer = await write(*args)
                if answer["metadata"]["name"] != "digits":
                    return answer
                await still_world.client.delete(JOBS, *key, uid=answer["metadata"]["uid"])

                async def told_of_it() -> bool:
                    return jobs.get(key) is None

                await until(told_of_it, "the watch tells of the deletion", 60)
                answered.set()
                return answer

            return writing

        for name in ("merge_status", "apply_status"):
            monkeypatch.setattr(client, name, delete_before_the_answer(getattr(client, name)))
        await still_world.submit("digits", numNodes=1)
        async with asyncio.timeout(60):
            await answered.wait()
            await made.queue.idle()
        assert jobs.get(key) is None


async def test_lists_that_leave_out_all_objects_once_lose_no_job(
    control_plane: ControlPlane, still_world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An API server whose cache is not filled yet answers so: with success, and nothing in it."""
    world, key = still_world, (still_world.namespace, "digits")
    left_out: set[str] = set()
    async with (
        operator(control_plane.kubeconfig, world, resync_seconds=600.0) as (made, client),
        Simulation(world, "digits") as simulation,
    ):
        await world.submit("digits", numNodes=2)
        await world.until_phase("digits", "Running")
        before = await world.pods("digits")
        listed = client.list

        async def list_nothing_once(resource: ApiResource, *args: Any, **options: Any) -> AsyncIterator[ListPage]:
            async for page in listed(resource, *args, **options):
                if resource in (POOLS, PODS, JOBS, NODES) and resource.plural not in left_out:
                    left_out.add(resource.plural)
                    yield ListPage([], page.version)
                    return
                yield page

        monkeypatch.setattr(client, "list", list_nothing_once)
        made.resync.request_soon()

        async def looks_after_it_again() -> bool:
            leader = made.leaders.view(key, before[0]["metadata"]["uid"])
            known = made.cache.jobs.get(key) is not None and len(made.cache.nodes) > 0
            return len(left_out) == 4 and known and leader is not None and leader.reachable

        await until(looks_after_it_again, "the job is known again")
        simulation.finish.set()
        status = await world.until_phase("digits", "Succeeded")
        assert (status["epoch"], status["restarts"]["total"]) == (1, 0)
        assert [pod["metadata"]["uid"] for pod in await world.pods("digits")] == [
            pod["metadata"]["uid"] for pod in before
        ]
