"""Raw pods, sorted out: the trainer's container counts, odd values do not hurt."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.agent.node.termination_message import encode_termination_message
from everstep_operator.api.reasons import Reason
from everstep_operator.plan.observation import TerminationMessage, parse_pod, parse_termination_message
from everstep_operator.plan.pod_replacement import explain_loss, has_succeeded, was_told_to_stop
from tests.builders import CREATED

AT = "2026-01-01T12:00:10Z"
SECONDS = CREATED.timestamp() + 10


def raw(*, state: dict[str, Any] | None = None, **status: Any) -> dict[str, Any]:
    containers = [
        {"name": "proxy", "state": {"running": {"startedAt": AT}}},
        {"name": "trainer", "state": state or {}},
    ]
    return {
        "metadata": {
            "name": "digits-1",
            "uid": "u1",
            "creationTimestamp": "2026-01-01T12:00:00Z",
            "labels": {"everstep.dev/index": "1", "everstep.dev/epoch": "2", "everstep.dev/template": "1"},
            "ownerReferences": [{"uid": "other"}, {"uid": "job", "controller": True}],
        },
        "spec": {"nodeName": "n1"},
        "status": {
            "phase": "Running",
            "podIP": "10.0.0.1",
            "containerStatuses": containers,
            "conditions": [{"type": "PodScheduled", "status": "True", "lastTransitionTime": AT}],
            **status,
        },
    }


def test_a_running_pod() -> None:
    pod = parse_pod(raw(state={"running": {"startedAt": AT}}))
    assert (pod.index, pod.epoch, pod.template, pod.owner) == (1, 2, 1, "job")
    assert (pod.node, pod.ip, pod.scheduled_at, pod.started_at) == ("n1", "10.0.0.1", SECONDS, SECONDS)
    assert pod.running
    assert pod.live


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ("WorkloadEvictedDueToPreempted", Reason.PREEMPTED),
        ("WorkloadEvicted", Reason.PREEMPTED),
        ("NoMatchingWorkload", Reason.EVICTED),
    ],
)
def test_a_pod_that_kueue_takes_back_for_another_workload_is_preempted(reason: str, expected: Reason) -> None:
    """Kueue, by whose queue the chart has pods queued, marks them by a condition of its own before it deletes them."""
    taken = raw(state={"running": {"startedAt": AT}})
    taken["metadata"] |= {"deletionTimestamp": AT, "deletionGracePeriodSeconds": 120}
    taken["status"]["conditions"].append({"type": "TerminationTarget", "status": "True", "reason": reason})
    assert explain_loss(parse_pod(taken)) is expected
    taken["status"]["conditions"][-1]["status"] = "False"
    assert explain_loss(parse_pod(taken)) is Reason.POD_DELETED


def test_a_container_that_could_not_be_started_has_not_been() -> None:
    over = {"exitCode": 128, "reason": "StartError", "startedAt": "1970-01-01T00:00:00Z", "finishedAt": AT}
    pod = parse_pod(raw(state={"terminated": over}))
    assert (pod.started_at, pod.running) == (None, False)
    assert pod.ended is not None


def test_the_trainer_counts_although_a_sidecar_runs_on() -> None:
    pod = parse_pod(raw(state={"terminated": {"exitCode": 137, "reason": "OOMKilled", "startedAt": AT}}))
    assert pod.ended is not None
    assert (pod.ended.exit_code, pod.ended.signal, pod.ended.reason) == (137, 9, "OOMKilled")
    assert not pod.running


@pytest.mark.parametrize("code", [0, 143])
def test_a_pod_that_its_kubelet_ends_keeps_the_reason_beside_its_exit_code(code: int) -> None:
    """A machine that shuts down gives containers the time to end: their states are there, and tell less."""
    over = {"terminated": {"exitCode": code, "reason": "Error" if code else "Completed", "startedAt": AT}}
    message = "Pod was terminated in response to imminent node shutdown."
    target = {"type": "DisruptionTarget", "status": "True", "reason": "TerminationByKubelet"}
    pod = parse_pod(raw(state=over, phase="Failed", reason="Terminated", message=message, conditions=[target]))
    assert pod.ended is not None
    assert (pod.ended.exit_code, pod.ended_by) == (code, "Terminated")
    assert was_told_to_stop(pod)
    assert explain_loss(pod) is Reason.EVICTED
    assert explain_loss(replace(pod, on_spot=True)) is Reason.SPOT_INTERRUPTION, "the only notice that GKE gives"


@pytest.mark.parametrize(
    ("message", "why", "reason"),
    [
        ("Pod was terminated in response to imminent node shutdown.", "Terminated", Reason.SPOT_INTERRUPTION),
        ("The node was low on resource: memory. ", "Evicted", Reason.EVICTED),
    ],
)
def test_a_pod_that_its_kubelet_ends_and_calls_succeeded_was_told_to_stop(
    message: str, why: str, reason: Reason
) -> None:
    """Kubelets since 1.27 give such a pod no reason, but for the condition."""
    over = {"terminated": {"exitCode": 0, "reason": "Completed", "startedAt": AT, "finishedAt": AT}}
    target = {"type": "DisruptionTarget", "status": "True", "reason": "TerminationByKubelet", "message": message}
    pod = parse_pod(raw(state=over, phase="Succeeded", conditions=[target]))
    assert pod.ended_by == why
    assert was_told_to_stop(pod)
    assert not has_succeeded(pod)
    assert explain_loss(pod) is Reason.EVICTED
    assert explain_loss(replace(pod, on_spot=True)) is reason


def test_a_pod_that_is_about_to_be_evicted_by_others_may_succeed_before() -> None:
    """They set the condition before they delete the pod: nobody has told its program yet."""
    over = {"terminated": {"exitCode": 0, "reason": "Completed", "startedAt": AT, "finishedAt": AT}}
    target = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}
    assert has_succeeded(parse_pod(raw(state=over, phase="Succeeded", conditions=[target])))


def test_an_evicted_pod_has_ended_without_an_exit_code() -> None:
    pod = parse_pod(raw(phase="Failed", reason="Evicted", message="low on memory", containerStatuses=[]))
    assert pod.ended is not None
    assert (pod.ended.exit_code, pod.ended.reason, pod.ended.message) == (None, "Evicted", "low on memory")


def failed_init(**over: Any) -> list[dict[str, Any]]:
    fetch = {"name": "fetch", "state": {"terminated": {"exitCode": 3, "reason": "Error", "finishedAt": AT, **over}}}
    return [{"name": "first", "state": {"terminated": {"exitCode": 0}}}, fetch]


def test_a_pod_whose_init_container_fails_says_which_and_how() -> None:
    waiting = {"waiting": {"reason": "PodInitializing"}}
    pod = parse_pod(raw(state=waiting, phase="Failed", initContainerStatuses=failed_init(message="no such bucket\n")))
    assert pod.ended is not None
    assert (pod.ended.exit_code, pod.ended.reason) == (3, "InitContainerFailed")
    assert pod.ended.message == "init container fetch failed (Error, exit code 3): no such bucket"


def test_a_pod_that_is_evicted_while_it_initializes_is_evicted() -> None:
    pod = parse_pod(raw(phase="Failed", reason="Evicted", initContainerStatuses=failed_init(exitCode=137)))
    assert pod.ended is not None
    assert (pod.ended.exit_code, pod.ended.reason) == (None, "Evicted")


def test_an_init_container_that_failed_is_not_the_end_of_a_pod_that_is_still_there() -> None:
    assert parse_pod(raw(phase="Pending", initContainerStatuses=failed_init())).ended is None


def test_a_disruption_is_seen_before_the_pod_is_gone() -> None:
    gone = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}
    assert parse_pod(raw(conditions=[gone])).disruption == "PreemptionByScheduler"
    assert parse_pod(raw(conditions=[{**gone, "status": "False"}])).disruption is None


def test_deleting_counts_from_the_request_not_from_the_end_of_the_grace() -> None:
    pod = raw()
    pod["metadata"] |= {"deletionTimestamp": AT, "deletionGracePeriodSeconds": 10}
    assert (parse_pod(pod).deleting_since, parse_pod(pod).deletion_grace) == (SECONDS - 10, 10)


def test_what_cannot_be_started_is_told_of_init_containers_and_the_trainer_alone() -> None:
    pod = raw(state={"waiting": {"reason": "PodInitializing"}})
    assert parse_pod(pod).container_wait == ""
    waits = {"waiting": {"reason": "CreateContainerConfigError", "message": 'secret "s3" not found'}}
    pod["status"]["initContainerStatuses"] = [{"name": "fetch", "state": waits}]
    assert parse_pod(pod).container_wait == 'init container fetch: CreateContainerConfigError secret "s3" not found'
    assert parse_pod(raw(state=waits)).container_wait == 'CreateContainerConfigError secret "s3" not found'
    pod = raw(state={"running": {"startedAt": AT}})
    pod["status"]["containerStatuses"].append({"name": "exporter", "state": waits})
    pod["status"]["initContainerStatuses"] = [{"name": "proxy", "state": waits}]
    assert parse_pod(pod).container_wait == "", "what runs beside the trainer does not keep it from starting"


def test_waiting_and_unschedulable_say_why() -> None:
    pod = raw(state={"waiting": {"reason": "ImagePullBackOff", "message": "x" * 9999}})
    assert parse_pod(pod).waiting_reason == "ImagePullBackOff"
    assert len(parse_pod(pod).waiting_message) == 1024
    pod["spec"] = {}
    pod["status"]["conditions"] = [{"type": "PodScheduled", "status": "False", "message": "0/3 nodes"}]
    assert parse_pod(pod).unschedulable == "0/3 nodes"
    assert not parse_pod(pod).scheduled


def test_a_pod_whose_gates_are_gone_waits_for_the_scheduler_though_its_condition_still_tells_of_gates() -> None:
    """The API server sets the condition when the pod is made, and nobody changes it before the scheduler."""
    pod = raw(state={"waiting": {}})
    said = {"reason": "SchedulingGated", "message": "Scheduling is blocked due to non-empty scheduling gates"}
    pod["status"]["conditions"] = [{"type": "PodScheduled", "status": "False", **said}]
    pod["spec"] = {"schedulingGates": [{"name": "kueue.x-k8s.io/admission"}]}
    assert (parse_pod(pod).gated, parse_pod(pod).unschedulable) == (True, said["message"])
    pod["spec"] = {}
    assert (parse_pod(pod).gated, parse_pod(pod).unschedulable) == (False, "")
    pod["status"]["conditions"][0] |= {"reason": "Unschedulable", "message": "0/3 nodes"}
    assert (parse_pod(pod).gated, parse_pod(pod).unschedulable) == (False, "0/3 nodes")


def test_an_agents_last_word_is_read_and_a_programs_is_not() -> None:
    word = {"result": "failed", "epoch": 2, "generation": 3, "rank": 1, "exitCode": 7, "message": "m", "logTail": ["a"]}
    assert parse_termination_message(json.dumps(word)) == TerminationMessage("failed", 2, 3, 1, 7, "m", ("a",))
    assert parse_termination_message("Traceback (most recent call last)") is None
    assert parse_termination_message('{"result": 1}') is None
    assert parse_termination_message("{") is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda below: st.lists(below, max_size=3) | st.dictionaries(st.text(max_size=5), below, max_size=3),
    max_leaves=10,
)


@given(word=st.dictionaries(st.sampled_from(["result", "epoch", "rank", "exitCode", "logTail", "message"]), JSON))
def test_no_last_word_breaks_the_operator(word: dict[str, Any]) -> None:
    parse_termination_message(json.dumps(word))


def test_of_a_last_word_that_a_kubelet_has_cut_off_all_but_the_end_is_read() -> None:
    """Each of six containers has 2 KiB: a kubelet keeps 12 KiB of a pod."""
    said = {"result": "failed", "epoch": 2, "generation": 3, "rank": 1, "exitCode": 7, "message": 'said "no", [and {'}
    told = {"generationHistory": ["2.1 Application"], "progress": {"step": 5, "at": 1.0}}
    whole = encode_termination_message({**said, "logTail": ["x, \\" * 20] * 20, **told}).decode()
    assert len(whole) > 2048
    word = parse_termination_message(whole[:2048])
    assert word is not None
    assert (word.result, word.epoch, word.exit_code, word.message) == ("failed", 2, 7, said["message"])
    assert word.progress is not None
    assert [entry.id for entry in word.history] == ["2.1"]
    for length in range(len(whole)):
        parse_termination_message(whole[:length])  # wherever it is cut


def test_a_last_word_that_a_program_made_up_is_harmless() -> None:
    # Infinity, half of a surrogate pair and a number that no status can hold: one pod must not stop the operator.
    text = '{"result": "failed", "epoch": 1e999, "exitCode": 99999999999, "rank": 1, "message": "\\ud800"}'
    assert parse_termination_message(text) == TerminationMessage("failed", 0, 0, 1, None, "?")
    assert parse_termination_message('{"result": "failed", "rank": -1}') == TerminationMessage("failed")
    assert parse_termination_message('{"result": ' + "[" * 4000) is None


def test_an_empty_pod_is_nobodys() -> None:
    pod = parse_pod({})
    assert (pod.index, pod.epoch, pod.owner) == (-1, -1, "")


def test_finalizers_count_once_a_pod_is_deleted() -> None:
    pod = raw()
    pod["metadata"]["finalizers"] = ["example.com/hold", "example.com/log"]
    assert parse_pod(pod).finalizers == ""
    pod["metadata"]["deletionTimestamp"] = AT
    assert parse_pod(pod).finalizers == "example.com/hold, example.com/log"
