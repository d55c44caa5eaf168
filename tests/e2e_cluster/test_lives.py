"""Two live pods of one index, as the audit log shows them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from e2e.cluster.controlplane import ControlPlane
from e2e.lives import lives, two_at_once, two_by_operator

NODE, OPERATOR = "system:node:node-1", "system:serviceaccount:everstep-system:everstep"


def line(verb: str, uid: str, at: int, *, user: str = OPERATOR, grace: int | None = None, **change: Any) -> str:
    pod = {
        "metadata": {
            "name": "job-0",
            "uid": uid,
            "labels": {"everstep.dev/job": "job", "everstep.dev/index": "0"},
            "deletionGracePeriodSeconds": grace,
        },
        "spec": {"nodeName": "node-1"},
        "status": {"phase": "Running"},
    }
    event = {
        "verb": verb,
        "requestURI": "/api/v1/namespaces/ns/pods",
        "user": {"username": user},
        "objectRef": {"resource": "pods", "namespace": "ns", "name": "job-0"},
        "responseStatus": {"code": 200},
        "responseObject": pod,
        "stageTimestamp": f"2026-01-01T00:00:{at:02}.000000Z",
    }
    return json.dumps(event | change) + "\n"


def wrong(*log: str) -> list[str]:
    return two_at_once(lives(log, "ns"))


def test_one_after_the_other_is_fine() -> None:
    told, gone = line("delete", "a", 2, grace=30), line("delete", "a", 3, grace=0, user=NODE)
    assert not wrong(line("create", "a", 1), told, gone, line("create", "b", 4))


def test_made_before_the_last_was_removed() -> None:
    told = line("delete", "a", 2, grace=30)
    assert wrong(line("create", "a", 1), told, line("create", "b", 3))
    assert wrong(line("create", "a", 1), line("create", "b", 3), line("delete", "a", 4, grace=0, user=NODE))


def test_a_forced_removal_may_leave_processes_behind() -> None:
    forced = line("delete", "a", 2, grace=0)
    assert wrong(line("create", "a", 1), forced, line("create", "b", 3))
    assert not wrong(line("create", "a", 1), forced), "nothing came after it"


def test_the_operator_may_force_a_removal_on_a_broken_node_only() -> None:
    log = line("create", "a", 1), line("delete", "a", 2, grace=0), line("create", "b", 3)
    assert two_by_operator(log, "ns", OPERATOR, set())
    assert not two_by_operator(log, "ns", OPERATOR, {"node-1"})
    by_user = line("create", "a", 1), line("delete", "a", 2, grace=0, user="admin"), line("create", "b", 3)
    assert not two_by_operator(by_user, "ns", OPERATOR, set())
    early = line("create", "a", 1), line("create", "b", 3), line("delete", "a", 4, grace=0, user=NODE)
    assert two_by_operator(early, "ns", OPERATOR, {"node-1"}), "also on a broken node"


def test_what_made_nothing_does_not_count() -> None:
    dry = line("create", "x", 1, requestURI="/api/v1/namespaces/ns/pods?dryRun=All")
    refused = line("create", "y", 1, responseStatus={"code": 409})
    other = line("create", "z", 1, objectRef={"resource": "pods", "namespace": "other"})
    assert not wrong(dry, refused, other, line("create", "a", 2), line("create", "c", 3)[:-1])


def test_a_log_of_which_a_part_was_put_aside_is_read_from_its_beginning(tmp_path: Path) -> None:
    (tmp_path / "audit-2026-11-29T23-55-02.255.log").write_text("one\n")
    (tmp_path / "audit.log").write_text("two\n")
    assert list(ControlPlane.open(tmp_path).read_audit_log()) == ["one\n", "two\n"]
