"""Plain mode: the image runs by itself, under the container contract, without an agent.

For images with no `command` given (SageMaker's own: entrypoint with the argument `train`) and for those in which the
agent cannot run. Ranks are one per pod and differ by index, so their variables are computed here; the files come from
the ConfigMap, and the one file that differs comes from an annotation of the pod.

The contract lists all hosts in six variables of every pod. A pod that held them would be written to etcd with them at
each change of its status; they stand in the ConfigMap once, and the variables refer to them there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from everstep.agent.ranks.container_contract import (
    ContractFacts,
    JobIdentity,
    build_contract_files,
    build_rank_variables,
    build_sm_environment,
    build_torchrun_variables,
    encode_json,
)
from everstep.agent.ranks.placement import RankPlacement
from everstep_operator.api.reasons import Reason
from everstep_operator.plan.observation import INIT_FAILED, ContainerEnd, PodView

RESOURCE_CONFIG_ANNOTATION = "everstep.dev/resourceconfig"
CONFIG_FOLDER = "/opt/ml/input/config"
HOSTS_FILE = "hosts.json"  # key in the ConfigMap
_HOSTS_VARIABLE = "EVERSTEP_HOSTS"
_VARIABLE_NAME = re.compile("[ -<>-~]+")  # what a pod may have: SM_HP_ and the name of a hyperparameter may be no such
MAX_NODES = 500  # the annotations of all pods grow with the square of it: 5 MB
MASTER_PORT = 7777
UNUSABLE_EXIT_CODE = 120  # the agent's exit code for "I cannot run in this image"
# What container runtimes say when python3 is not in the image; they exit 127 (not found), 126 or 128 then. They say so
# too where a GPU driver, a hook or a mount of the node lets no container start: so their words decide.
NOT_STARTED = frozenset({"StartError", "ContainerCannotRun", "RunContainerError"})
# CRI-O tries again for ever instead: the pod waits.
_NOT_CREATED = frozenset({"CreateContainerError", "RunContainerError"})
# As the name of a program, which all but Kata quote: paths of mounts may contain it.
_NO_PYTHON = re.compile(r"(?is)(?=.*python3(\\?[\"'`]| was not found)).*(not found|no such file|permission denied)")

# What runtimes say about a program that they cannot start; also about programs of their hooks.
_OF_A_PROGRAM = re.compile(r"(?i)exec: |executable")


def find_agent_obstacle(pods: Iterable[PodView]) -> tuple[Reason, str] | None:
    """Return why a pod that was to run the agent cannot, and what the pod said; None if none shows that."""
    for pod in pods:
        if pod.ended is not None and not pod.deleting and (reason := _find_unusable_reason(pod.ended)) is not None:
            return reason, pod.ended.word.message if pod.ended.word else pod.ended.message
        if pod.live and pod.waiting_reason in _NOT_CREATED and _NO_PYTHON.search(pod.waiting_message):
            return Reason.NO_PYTHON, pod.waiting_message
    return None


def _find_unusable_reason(end: ContainerEnd) -> Reason | None:
    if end.reason == INIT_FAILED:
        return None  # the exit code of another container
    if end.word is not None:
        return Reason.PYTHON_UNSUPPORTED if end.word.result == "unusable" else None
    if end.exit_code == UNUSABLE_EXIT_CODE:
        return Reason.PYTHON_UNSUPPORTED
    is_missing = _NO_PYTHON.search(end.message) is not None if end.reason in NOT_STARTED else end.exit_code == 127
    return Reason.NO_PYTHON if is_missing else None


def has_node_failed(end: ContainerEnd) -> bool:
    """Return whether a container could not be started for something else than its program: a GPU driver, a hook, a
    mount."""
    is_of_program = not end.message or ("hook" not in end.message and _OF_A_PROGRAM.search(end.message))
    return end.reason in NOT_STARTED and not is_of_program


def build_plain_files(job: Mapping[str, Any]) -> dict[str, str]:
    """Return what is the same in every pod, by key in the ConfigMap: the contract files, and the list of all hosts."""
    facts = _make_contract_facts(job, 0)
    shared = {
        path.rpartition("/")[2]: data.decode()
        for path, data in build_contract_files(facts).items()
        if "resourceconfig" not in path
    }
    return {**shared, HOSTS_FILE: encode_json(facts.hosts)}


def build_pod_annotations(job: Mapping[str, Any], index: int) -> dict[str, str]:
    text = build_contract_files(_make_contract_facts(job, index))[f"{CONFIG_FOLDER}/resourceconfig.json"].decode()
    return {RESOURCE_CONFIG_ANNOTATION: text}


def build_environment(
    job: Mapping[str, Any], index: int, config_map: str, epoch: int, user: list[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """Return the contract's variables for pod `index`, then the user's own, which win.

    Args:
        job: The resolved job.
        index: Of the pod.
        config_map: Name of the ConfigMap with build_plain_files().
        epoch: Of the set: with each set that is made again, ranks get a greater fencing token.
        user: The user's variables.
    """
    nodes = job["numNodes"]
    master = "algo-1" if nodes > 1 else "127.0.0.1"
    facts, about = _make_contract_facts(job, index), job["job"]
    variables = {
        **job.get("variables", {}),
        **build_sm_environment(facts),
        **build_rank_variables(
            RankPlacement(rank=index, local_rank=0, world_size=nodes, local_world_size=1),
            node_rank=index,
            master_addr=master,
            master_port=MASTER_PORT,
            epoch=epoch,
            generation=1,
            # A template of before jobs told when they were created goes on without.
            job=JobIdentity(about["namespace"], about["name"], int(about.get("created") or 0)),
            progress=None,
        ),
        **build_torchrun_variables(
            num_nodes=nodes,
            node_rank=index,
            procs_per_node=job["numProcPerNode"],
            master_addr=master,
            master_port=MASTER_PORT,
        ),
    }
    own = {item["name"] for item in user}
    hosts = encode_json(facts.hosts)
    reference = {"configMapKeyRef": {"name": config_map, "key": HOSTS_FILE}}
    # Kubernetes expands $(NAME) in values; the contract's are to arrive as they are.
    ours = [
        {"name": n, "value": v.replace("$", "$$").replace(hosts, f"$({_HOSTS_VARIABLE})")}
        for n, v in sorted(variables.items())
        if n not in own and _VARIABLE_NAME.fullmatch(n)
    ]
    return [{"name": _HOSTS_VARIABLE, "valueFrom": reference}, *ours, *user]


def _make_contract_facts(job: Mapping[str, Any], index: int) -> ContractFacts:
    return ContractFacts(
        job=job["job"]["name"],
        hyperparameters=job["hyperparameters"],
        num_nodes=job["numNodes"],
        node_index=index,
        instance_type=job["instanceType"],
        command=job["command"],
        num_cpus=job["cpus"],
        num_gpus=job["gpus"],
        master_port=MASTER_PORT,
    )
