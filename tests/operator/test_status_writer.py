"""A status is written by the requests that it needs, over CRDs of its own version and older ones."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from benchmarks.generated_cluster import apply_merge_patch
from everstep_operator.api.job import TrainingJob
from everstep_operator.api.status import Disruption, Phase, TrainingJobStatus
from everstep_operator.cluster import errors
from everstep_operator.cluster.cache import CacheEntry, resource_version
from everstep_operator.cluster.status_writer import StatusWriter
from tests.builders import CREATED, job

RUNNING = TrainingJobStatus(phase=Phase.RUNNING, epoch=1, nodes=2)
NOTICE = Disruption(reason="SpotInterruption", nodes=["n1"], noticed=CREATED)


class Server:
    """One job, of whose status the CRDs know no field in `lacks`. What was merged has an owner of its own, so that an
    apply removes nothing of it."""

    def __init__(self, status: TrainingJobStatus) -> None:
        self.lacks: set[str] = set()
        self.requests: list[tuple[str, Any]] = []
        self.stored: Any = {**job().meta(resourceVersion="7").manifest(), "status": status.manifest()}

    async def merge_status(self, resource: Any, namespace: str, body: Any) -> Any:
        return self._change("merge", body)

    async def apply_status(self, resource: Any, namespace: str, body: Any) -> Any:
        if missing := sorted(self.lacks & body["status"].keys()):
            self.requests.append(("rejected", missing))
            message = "\n".join(f"  .status.{name}: field not declared in schema" for name in missing)
            raise errors.from_status(500, {"message": message})
        return self._change("apply", body)

    def _change(self, how: str, body: Any) -> Any:
        meta, before = self.stored["metadata"], self.stored["status"]
        self.requests.append((how, body["status"]))
        if body["metadata"]["resourceVersion"] != meta["resourceVersion"]:
            raise errors.Conflict(409, "Conflict", "it has changed since")
        status = {
            name: each for name, each in apply_merge_patch(before, body["status"]).items() if name not in self.lacks
        }
        if status != before:
            meta = {**meta, "resourceVersion": str(int(meta["resourceVersion"]) + 1)}
        self.stored = {**self.stored, "metadata": meta, "status": status}
        return copy.deepcopy(self.stored)

    def show(self) -> tuple[TrainingJob, CacheEntry[Any]]:
        """Return the job as a cache shows it."""
        there = copy.deepcopy(self.stored)
        return TrainingJob.parse_stored(there), CacheEntry("uid", resource_version(there), there)


async def make_writer(server: Server) -> StatusWriter:
    """A writer that has written the stored status once, and knows by that what the CRDs hold."""
    writer = StatusWriter(server)  # type: ignore[arg-type]
    observed, known = server.show()
    await writer.write(observed, observed.status, known)
    assert [how for how, _ in server.requests] == ["apply"]
    server.requests.clear()
    return writer


async def test_a_status_is_one_merge_patch_of_what_has_changed() -> None:
    server = Server(RUNNING.model_copy(update={"disruption": NOTICE}))
    writer = await make_writer(server)
    observed, known = server.show()
    status = RUNNING.model_copy(update={"ready_nodes": 2})
    stored = await writer.write(observed, status, known)
    assert server.requests == [("merge", {"readyNodes": 2, "disruption": None})]
    assert stored["status"] == status.manifest()


async def test_of_two_operators_that_have_observed_one_version_only_one_writes() -> None:
    server = Server(RUNNING)
    writer = await make_writer(server)
    (first, known), (second, _) = server.show(), server.show()
    await writer.write(first, RUNNING.model_copy(update={"epoch": 2}), known)
    for shown in (known, server.show()[1], None):  # what another version has counts for nothing
        with pytest.raises(errors.Conflict):
            await writer.write(second, RUNNING.model_copy(update={"nodes": 3}), shown)
    assert server.stored["status"] == {**RUNNING.manifest(), "epoch": 2}


async def test_what_older_crds_drop_is_learned_by_an_apply_and_left_out_from_then_on() -> None:
    server = Server(RUNNING)
    writer = await make_writer(server)
    server.lacks = {"nodes", "usage"}
    for ready, requests in ((1, ["merge", "rejected", "apply"]), (2, ["merge"])):
        observed, known = server.show()
        await writer.write(observed, RUNNING.model_copy(update={"ready_nodes": ready}), known)
        assert [how for how, _ in server.requests] == requests
        assert server.stored["status"]["readyNodes"] == ready
        server.requests.clear()
    assert writer.undeclared.keep(RUNNING) == {"nodes": 2}


async def test_of_a_status_whose_epoch_has_no_place_nothing_is_written() -> None:
    """A part of it would be a job without its epochs once the CRDs are upgraded, and each part would be a new look."""
    server = Server(RUNNING)
    server.lacks = {"epoch"}
    writer = StatusWriter(server)  # type: ignore[arg-type]
    for ready in range(3):
        observed, known = server.show()
        with pytest.raises(errors.Undeclared):
            await writer.write(observed, RUNNING.model_copy(update={"ready_nodes": ready}), known)
    assert server.stored["status"] == RUNNING.manifest()


async def test_crds_that_are_replaced_by_such_ones_are_found_out_by_one_write() -> None:
    server = Server(RUNNING)
    writer = await make_writer(server)
    server.lacks = {"epoch"}
    for ready in (1, 2, 3):
        observed, known = server.show()
        with pytest.raises(errors.Undeclared):
            await writer.write(observed, RUNNING.model_copy(update={"ready_nodes": ready}), known)
    assert server.stored["status"]["readyNodes"] == 1
