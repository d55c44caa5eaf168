"""Plain mode: when it is chosen, and how a set without a leader is restarted."""

from __future__ import annotations

import dataclasses

import pytest

from everstep_operator.api.status import ConditionType
from everstep_operator.plan.observation import ContainerEnd, TerminationMessage, parse_pod
from everstep_operator.plan.pod_manifest import build_pod
from tests.builders import job
from tests.plan.world import World


def starting(nodes: int = 2) -> World:
    world = World(job().nodes(nodes).build())
    world.reconcile()
    world.bind()
    world.start()
    world.reconcile()
    return world


def plain(nodes: int = 2) -> World:
    return World(job().nodes(nodes).plain().build()).run("Running")


def test_a_job_without_a_command_is_plain_from_the_start() -> None:
    world = plain()
    told = world.status.condition(ConditionType.PLAIN_MODE)
    assert told is not None
    assert (told.status, told.reason) == ("True", "NoCommand")


@pytest.mark.parametrize(
    ("exit_code", "reason", "word", "expected"),
    [
        (127, "Error", None, "NoPython"),
        (120, "Error", None, "PythonUnsupported"),
        (120, "Error", TerminationMessage("unusable", message="Python 3.6 is too old"), "PythonUnsupported"),
    ],
)
def test_an_image_that_cannot_run_the_agent_is_run_without_it_once_and_free(
    exit_code: int, reason: str, word: TerminationMessage | None, expected: str
) -> None:
    world = starting()
    world.exit(1, exit_code, reason=reason, word=word)
    world.reconcile()
    assert world.status.template is not None
    assert world.status.template.plain
    world.run("Running")
    told = world.status.condition(ConditionType.PLAIN_MODE)
    assert told is not None
    assert told.reason == expected
    assert world.status.restarts.total == 0


RUNC = "OCI runtime create failed: runc create failed: unable to start container process: "


@pytest.mark.parametrize("reason", ["StartError", "ContainerCannotRun"])
@pytest.mark.parametrize(
    ("exit_code", "message", "is_plain"),
    [
        (128, f'{RUNC}exec: "python3": executable file not found in $PATH: unknown', True),
        (127, f'{RUNC}exec: \\"python3\\": executable file not found in $PATH', True),
        (126, f'{RUNC}exec: "python3": permission denied: unknown', True),
        (128, 'error finding executable "python3" in PATH [/bin]: no such file or directory', True),
        (128, "rpc error: code = Internal desc = the file python3 was not found: unknown", True),
        (128, f"{RUNC}error running hook #0: nvidia-container-cli: initialization error: driver not loaded", False),
        (127, f"{RUNC}nvidia-container-cli: load library failed: libnvidia-ml.so.1: no such file or directory", False),
        (128, f'{RUNC}error mounting "/x" to rootfs at "/usr/lib/python3/dist-packages": no such file', False),
        (128, "", False),
    ],
)
def test_a_container_that_cannot_start_runs_without_the_agent_only_where_python_is_what_lacks(
    exit_code: int, reason: str, message: str, is_plain: bool
) -> None:
    """A node whose GPU driver is broken starts no container either; in plain mode a pod would run one rank, not 8."""
    world = World(job().nodes(2).spec(numProcPerNode=8).build())
    world.reconcile()
    world.bind()
    world.reconcile()
    over = ContainerEnd(exit_code, None, reason, message, world.now)
    world.pods["digits-1"] = dataclasses.replace(world.pods["digits-1"], ended=over, phase="Failed")
    world.run("Running")
    assert world.status.template is not None
    assert world.status.template.plain is is_plain
    assert world.status.restarts.total == 0


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        (
            f"{RUNC}error running hook #0: nvidia-container-cli: initialization error: driver not loaded",
            "infrastructure",
        ),
        (f'{RUNC}error running hook #0: exec: "nvidia-ctk": executable file not found in $PATH', "infrastructure"),
        ("failed to inject CDI devices: unresolvable CDI devices nvidia.com/gpu=0", "infrastructure"),
        (f'{RUNC}exec: "trian": executable file not found in $PATH', "application"),
        ("executable file `trian` not found in $PATH: No such file or directory", "application"),
        ("", "application"),
    ],
)
def test_a_program_that_its_node_cannot_start_has_not_failed(message: str, cause: str) -> None:
    world = plain()
    over = ContainerEnd(128, None, "StartError", message, world.now)
    world.pods["digits-1"] = dataclasses.replace(world.pods["digits-1"], started_at=None, ended=over, phase="Failed")
    world.reconcile()
    restarts = world.status.restarts
    assert (restarts.application, restarts.infrastructure) == ((1, 0) if cause == "application" else (0, 1))
    assert restarts.charges[-1].reason == ("ApplicationError" if cause == "application" else "PodLost")


@pytest.mark.parametrize("ending", ["StartError", "unusable"])
def test_a_job_that_has_trained_keeps_its_agents_after_a_queue_has_evicted_it(ending: str) -> None:
    """Without them it would go on with one rank in each pod, for the sake of one bad node."""
    world = World(job().nodes(2).procs(8).build(), capacity=2).run("Running")
    for index in range(2):
        world.delete(index, disruption="WorkloadEvictedDueToPreempted")
    world.reconcile()
    world.bury()
    world.reconcile()
    world.pods = {name: dataclasses.replace(pod, gated=True) for name, pod in world.pods.items()}
    world.reconcile()
    assert world.phase == "Scheduling"
    world.pods = {name: dataclasses.replace(pod, gated=False) for name, pod in world.pods.items()}
    world.run("Starting")
    message = f'{RUNC}exec: "python3": no such file or directory'
    word = TerminationMessage("unusable", message="no") if ending == "unusable" else None
    end = ContainerEnd(128, None, ending, message, world.now, word)
    world.pods["digits-1"] = dataclasses.replace(world.pods["digits-1"], ended=end, phase="Failed")
    world.reconcile()
    world.run("Running")
    assert world.status.template is not None
    assert not world.status.template.plain
    for value in (True, False):  # by then it may have another image
        world.edit(suspend=value)
        world.run("Suspended" if value else "Starting")
    world.pods["digits-1"] = dataclasses.replace(world.pods["digits-1"], ended=end, phase="Failed")
    world.reconcile()
    assert world.status.template.plain


CRIO = "container create failed: executable file `python3` not found in $PATH: No such file or directory"


@pytest.mark.parametrize(
    ("reason", "message", "is_plain"),
    [
        ("CreateContainerError", CRIO, True),
        ("RunContainerError", 'exec: "python3": executable file not found in $PATH', True),
        ("CreateContainerError", "mount of /opt/ml/model: no such file or directory", False),
        ("ImagePullBackOff", "example.com/python3: not found", False),
    ],
)
def test_a_runtime_that_tries_for_ever_to_start_the_agent_is_not_waited_for(
    reason: str, message: str, is_plain: bool
) -> None:
    world = World(job().nodes(2).build())
    world.reconcile()
    world.bind()
    stuck = dataclasses.replace(world.pods["digits-1"], waiting_reason=reason, waiting_message=message)
    world.pods["digits-1"] = stuck
    world.reconcile()
    assert (world.status.template is not None and world.status.template.plain) is is_plain
    if is_plain:
        assert world.pods["digits-1"].deleting, "it would wait for ever"
        world.run("Running")
        assert world.status.restarts.total == 0


def test_a_hyperparameter_whose_name_no_pod_can_have_as_a_variable_is_in_the_others() -> None:
    world = World(job().plain().spec(hyperparameters={"λ": "1", "lr": "2"}).build()).run("Running")
    frozen = world.observe().frozen
    assert frozen is not None
    variables = {
        each["name"]: each.get("value", "") for each in build_pod(frozen, 0, 1)["spec"]["containers"][0]["env"]
    }
    assert variables["SM_HP_LR"] == "2"
    assert "λ" in variables["SM_HPS"]
    assert all(name.isascii() for name in variables)


def test_a_large_job_without_a_command_fails_before_anything_is_made() -> None:
    world = World(job().nodes(501).plain().build()).run("Failed")
    assert not world.pods


def test_a_large_job_whose_image_cannot_carry_the_agent_fails_and_says_how_large_it_may_be() -> None:
    world = World(job().nodes(501).build())
    world.reconcile()
    world.bind()
    stuck = dataclasses.replace(world.pods["digits-1"], waiting_reason="CreateContainerError", waiting_message=CRIO)
    world.pods["digits-1"] = stuck
    world.run("Failed")
    failed = next(c for c in world.status.conditions if c.type == "Failed")
    assert failed.reason == "InvalidTemplate"
    assert "numNodes is 501" in failed.message
    assert "at most 500 nodes" in failed.message


def test_a_ranks_own_exit_code_127_is_its_failure() -> None:
    world = starting()
    world.exit(0, 127, word=TerminationMessage("failed", epoch=1, exit_code=127))
    world.reconcile()
    assert world.phase == "Failed"


def test_all_containers_must_succeed() -> None:
    world = plain()
    world.exit(0, 0)
    world.reconcile()
    assert world.phase == "Running"
    world.exit(1, 0)
    world.reconcile()
    assert world.phase == "Succeeded"


def test_a_failed_container_restarts_the_whole_set_under_a_new_epoch() -> None:
    world = plain()
    world.exit(1, 1)
    world.exit(0, 1)
    world.reconcile()
    assert world.phase == "Restarting"
    assert world.status.restarts.application == 1
    assert all(p.deleting for p in world.pods.values())
    world.run("Running")
    assert {p.epoch for p in world.pods.values()} == {2}
    assert world.status.restarts.total == 1


def test_a_lost_plain_pod_restarts_the_set_at_the_infrastructures_cost() -> None:
    world = plain()
    world.vanish(1)
    world.run("Restarting")
    world.run("Running")
    assert world.status.restarts.infrastructure == world.status.restarts.total == 1
    assert {p.epoch for p in world.pods.values()} == {2}


def test_plain_failures_end_with_the_budget() -> None:
    world = World(job().nodes(2).plain().restart(application=1).build())
    for _ in range(2):
        world.run("Running")
        world.exit(1, 1)
        world.reconcile()
    assert world.phase == "Failed"
    assert world.status.transitions[-1].reason == "RestartBudgetExceeded"


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_program_that_exits_with_0_because_it_is_told_to_stop_has_not_succeeded(nodes: int) -> None:
    """Its handler of TERM saves, as it should. The operator looks when all of that is over."""
    world = World(job().nodes(nodes).plain().build()).run("Running")
    for index in range(nodes):
        world.delete(index, disruption="EvictionByEvictionAPI")
    world.now += 3
    for index in range(nodes):
        world.exit(index, 0)
    world.reconcile()
    assert world.phase == "Restarting"
    assert world.status.restarts.infrastructure == world.status.restarts.total == 1
    world.run("Running")


@pytest.mark.parametrize(("why", "reason"), [("Terminated", "Evicted"), ("DeadlineExceeded", "PodLost")])
def test_a_program_that_exits_with_0_because_its_machine_shuts_down_has_not_succeeded(why: str, reason: str) -> None:
    """A kubelet that shuts down deletes no pod: it ends them, and says so of the pod; as for activeDeadlineSeconds."""
    world = World(job().plain().build()).run("Running")
    world.exit(0, 0)
    world.pods["digits-0"] = dataclasses.replace(world.pods["digits-0"], phase="Failed", ended_by=why)
    world.reconcile()
    assert world.phase == "Restarting"
    assert world.status.last_failure is not None
    assert (world.status.last_failure.reason, world.status.restarts.infrastructure) == (reason, 1)


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_program_that_exits_with_0_because_its_kubelet_stops_it_has_not_succeeded(nodes: int) -> None:
    """Kubelets call such a pod Succeeded: a condition alone tells that it was evicted."""
    world = World(job().nodes(nodes).plain().build()).run("Running")
    target = {"type": "DisruptionTarget", "status": "True", "reason": "TerminationByKubelet"}
    told = parse_pod({"status": {"phase": "Succeeded", "conditions": [target]}})
    for index in range(nodes):
        world.exit(index, 0)
        world.pods[f"digits-{index}"] = dataclasses.replace(
            world.pods[f"digits-{index}"], phase=told.phase, disruption=told.disruption, ended_by=told.ended_by
        )
    world.reconcile()
    assert world.phase == "Restarting"
    assert world.status.restarts.infrastructure == world.status.restarts.total == 1
    world.run("Running")


def test_a_program_that_is_told_to_stop_on_a_node_whose_clock_is_behind_has_not_succeeded() -> None:
    world = World(job().plain().build()).run("Running")
    pod = world.pods["digits-0"]
    world.pods["digits-0"] = dataclasses.replace(pod, deleting_since=world.now, deletion_grace=120)
    world.now -= 20  # as the node has it
    world.exit(0, 0)
    world.now += 25
    world.reconcile()
    assert world.phase == "Restarting"
    assert (world.status.restarts.infrastructure, world.status.restarts.application) == (1, 0)
    world.run("Running")


@pytest.mark.parametrize(("code", "reason"), [(255, "Unknown"), (137, "ContainerStatusUnknown")])
def test_a_machine_that_is_started_anew_is_no_failure_of_the_program(code: int, reason: str) -> None:
    world = plain()
    world.exit(1, code, reason=reason)
    world.run("Restarting")
    world.run("Running")
    assert (world.status.restarts.infrastructure, world.status.restarts.application) == (1, 0)


def test_a_pod_that_is_deleted_after_its_program_has_ended_has_succeeded() -> None:
    world = plain()
    world.exit(0, 0)
    world.exit(1, 0)
    world.now += 1
    world.delete(1)
    world.reconcile()
    assert world.phase == "Succeeded"


def restarts_of(world: World, exit_code: int, seconds: float) -> int:
    """Let the program fail as soon as it runs; return the restarts in so many seconds."""
    end = world.now + seconds
    while world.now < end:
        world.exit(0, exit_code)
        world.exit(1, exit_code)
        world.reconcile()
        world.tick()
    return world.status.restarts.total


def test_failures_in_a_row_are_restarted_after_longer_and_longer_pauses() -> None:
    """Nothing else would bound how often pods are made where an exit code costs nothing."""
    ignored = {"onExitCodes": [{"codes": [75], "action": "Ignore"}]}
    world = World(job().nodes(2).plain().restart(application=0, **ignored).build()).run("Running")
    assert restarts_of(world, 75, 600) < 20
    assert world.status.restarts.ignored == world.status.restarts.total
    impatient = World(job().nodes(2).plain().restart(application=1000, maxBackoff="0s").build()).run("Running")
    assert restarts_of(impatient, 1, 60) > 15


def test_a_failure_after_a_long_run_is_the_first_in_a_row() -> None:
    world = World(job().nodes(2).plain().restart(application=1000, window="1s").build()).run("Running")
    restarts_of(world, 1, 300)
    world.run("Running")
    world.now += 3600
    world.exit(1, 1)
    world.run("Restarting")
    began = world.now
    world.run("Running")
    assert world.now - began < 10


def fencing_tokens(world: World) -> set[tuple[str, str]]:
    """Return what the ranks of each pod are told."""
    frozen = world.observe().frozen
    assert frozen is not None
    found = set()
    for pod in world.pods.values():
        container = build_pod(frozen, pod.index, pod.epoch)["spec"]["containers"][0]
        told = {e["name"]: e.get("value") for e in container["env"]}
        found.add((told["EVERSTEP_EPOCH"], told["EVERSTEP_GENERATION"]))
    return found


def test_a_set_that_is_made_again_gets_a_greater_fencing_token() -> None:
    """Ranks of the set before may run on, on a node that is cut off."""
    world = plain()
    assert fencing_tokens(world) == {("1", "1")}
    world.exit(1, 1)
    world.run("Restarting")
    world.run("Running")
    assert fencing_tokens(world) == {("2", "1")}


def test_all_ranks_of_a_set_have_one_fencing_token_though_pod_0_was_lost_at_its_start() -> None:
    world = World(job().nodes(3).plain().build())
    world.reconcile()
    world.bind()
    world.vanish(0)
    world.run("Running")
    assert fencing_tokens(world) == {("2", "1")}
    assert world.status.restarts.total == 0
