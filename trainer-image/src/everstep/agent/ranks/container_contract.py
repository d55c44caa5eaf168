"""The container contract: the files and variables that SageMaker's training images expect (pure functions).

Names and forms are those of sagemaker-training-toolkit (`environment.py`, `mapping.py`) and of the SDK 3 drivers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from everstep.agent.ranks.placement import RankPlacement

INSTANCE_GROUP = "homogeneousCluster"
MAX_VARIABLE_BYTES = (
    128 * 1024 - 1
)  # Linux MAX_ARG_STRLEN less the final NUL: a longer `name=value` makes every exec fail

# What an operator's agent must know and a rank need not. Epoch and generation come back in `build_rank_variables`.
AGENT_VARIABLES = (
    "EVERSTEP_INDEX",
    "EVERSTEP_EPOCH",
    "EVERSTEP_POD_UID",
    "EVERSTEP_POD_IP",
    "EVERSTEP_LEADER",
)


class ContractFacts(NamedTuple):
    """Facts about one node of a job from which the whole contract follows."""

    job: str
    hyperparameters: Mapping[str, str]
    num_nodes: int
    node_index: int
    instance_type: str
    command: Sequence[str] = ()
    num_cpus: int = 1
    num_gpus: int = 0
    network_interface: str = "eth0"
    master_addr: str = "algo-1"
    master_port: int = 7777
    ml: str = "/opt/ml"

    @property
    def current_host(self) -> str:
        return f"algo-{self.node_index + 1}"

    @property
    def hosts(self) -> list[str]:
        """Return the hosts in lexicographic order, as SageMaker lists them: algo-1, algo-10, algo-2."""
        return sorted(f"algo-{i + 1}" for i in range(self.num_nodes))


def build_contract_files(facts: ContractFacts) -> dict[str, bytes]:
    """Return the configuration files by absolute path."""
    folder = f"{facts.ml}/input/config"
    return {
        f"{folder}/hyperparameters.json": encode_json(dict(facts.hyperparameters)).encode(errors="replace"),
        f"{folder}/resourceconfig.json": encode_json(_resource_config(facts)).encode(),
        f"{folder}/inputdataconfig.json": b"{}",
    }


def list_contract_folders(facts: ContractFacts) -> tuple[str, ...]:
    """Return the folders that a script may rely on, parents first."""
    inputs, outputs = ("input", "input/config", "input/data"), ("output", "output/data", "output/intermediate")
    return tuple(f"{facts.ml}/{name}" for name in (*inputs, "model", *outputs, "checkpoints"))


def build_sm_environment(facts: ContractFacts) -> dict[str, str]:
    """Return all SM_* variables and TRAINING_JOB_NAME, but those of features that a job cannot have here."""
    hyperparameters = {name: _decode_hyperparameter(text) for name, text in facts.hyperparameters.items()}
    user_args = _user_args(hyperparameters)
    resource_config = _resource_config(facts)
    values: dict[str, Any] = {
        "SM_HOSTS": facts.hosts,
        "SM_CURRENT_HOST": facts.current_host,
        "SM_HOST_COUNT": facts.num_nodes,
        # The position in SM_HOSTS, which is NODE_RANK only below ten nodes.
        "SM_CURRENT_HOST_RANK": facts.hosts.index(facts.current_host),
        "SM_MASTER_ADDR": facts.master_addr,
        "SM_MASTER_PORT": facts.master_port,
        "SM_NETWORK_INTERFACE_NAME": facts.network_interface,
        "SM_CURRENT_INSTANCE_TYPE": facts.instance_type,
        "SM_CURRENT_INSTANCE_GROUP": INSTANCE_GROUP,
        "SM_CURRENT_INSTANCE_GROUP_HOSTS": facts.hosts,
        "SM_INSTANCE_GROUPS": [INSTANCE_GROUP],
        "SM_INSTANCE_GROUPS_DICT": {INSTANCE_GROUP: resource_config["instance_groups"][0]},
        "SM_DISTRIBUTION_INSTANCE_GROUPS": [],
        "SM_IS_HETERO": False,
        "SM_RESOURCE_CONFIG": resource_config,
        "SM_INPUT_DATA_CONFIG": {},
        "SM_CHANNELS": [],
        "SM_HPS": hyperparameters,
        "SM_USER_ARGS": user_args,
        "SM_USER_ENTRY_POINT": _entry_point(facts.command),
        "SM_FRAMEWORK_PARAMS": {},
        "SM_FRAMEWORK_MODULE": None,
        "SM_MODULE_NAME": None,
        "SM_MODULE_DIR": None,
        "SM_LOG_LEVEL": 20,
        "SM_NUM_CPUS": facts.num_cpus,
        "SM_NUM_GPUS": facts.num_gpus,
        "SM_NUM_NEURONS": 0,
        "SM_MODEL_DIR": f"{facts.ml}/model",
        "SM_INPUT_DIR": f"{facts.ml}/input",
        "SM_INPUT_CONFIG_DIR": f"{facts.ml}/input/config",
        "SM_INPUT_DATA_DIR": f"{facts.ml}/input/data",
        "SM_OUTPUT_DIR": f"{facts.ml}/output",
        "SM_OUTPUT_DATA_DIR": f"{facts.ml}/output/data",
        "SM_OUTPUT_INTERMEDIATE_DIR": f"{facts.ml}/output/intermediate",
        "SM_OUTPUT_FAILURE": f"{facts.ml}/output/failure",
        "TRAINING_JOB_NAME": facts.job,
    }
    values["SM_TRAINING_ENV"] = _training_env(values)
    for name, value in hyperparameters.items():
        values[f"SM_HP_{name.upper()}"] = value
    return drop_unusable_variables({name: _format_variable(value) for name, value in values.items()})


class JobIdentity(NamedTuple):
    """The identity of a job to its ranks, and to a checkpoint store. `attempt_base`: see `name_attempt`."""

    namespace: str
    name: str
    attempt_base: int = 0


def name_attempt(base: int, epoch: int, generation: int) -> str | None:
    """Return how a generation is called in a checkpoint store; None: by its epoch and its generation alone.

    Each job begins with epoch 1. With the time of its creation, which is the base, what a job saves that was made anew
    under its name is newer than all that the former one has saved. No job has an epoch more often than each second.
    """
    return f"{base + epoch}.{generation}" if base else None


def build_rank_variables(
    placement: RankPlacement,
    *,
    node_rank: int,
    master_addr: str,
    master_port: int,
    epoch: int,
    generation: int,
    job: JobIdentity,
    progress: str | None,
    checkpoint_request: str | None = None,
) -> dict[str, str]:
    """Return the variables that tell a rank who it is.

    Args:
        placement: Its ranks among all and on its node, and how many there are.
        node_rank: Index of its node.
        master_addr: Host of rank 0.
        master_port: Port of rank 0.
        epoch: The leader's epoch.
        generation: The generation within the epoch.
        job: The job.
        progress: Path of the rank's FIFO for progress, if it has one.
        checkpoint_request: Path of the file that appears when a checkpoint is asked for, if there is an agent.
    """
    variables = {
        "RANK": str(placement.rank),
        "WORLD_SIZE": str(placement.world_size),
        "LOCAL_RANK": str(placement.local_rank),
        "LOCAL_WORLD_SIZE": str(placement.local_world_size),
        "NODE_RANK": str(node_rank),
        "GROUP_RANK": str(node_rank),
        "MASTER_ADDR": master_addr,
        "MASTER_PORT": str(master_port),
        "EVERSTEP_EPOCH": str(epoch),
        "EVERSTEP_GENERATION": str(generation),
        "EVERSTEP_JOB": job.name,
        "EVERSTEP_JOB_NAMESPACE": job.namespace,
    }
    if (attempt := name_attempt(job.attempt_base, epoch, generation)) is not None:
        variables["EVERSTEP_ATTEMPT"] = attempt
    if progress is not None:
        variables["EVERSTEP_PROGRESS"] = progress
    if checkpoint_request is not None:
        variables["EVERSTEP_CHECKPOINT_REQUEST"] = checkpoint_request
    return variables


def build_torchrun_variables(
    *, num_nodes: int, node_rank: int, procs_per_node: int, master_addr: str, master_port: int
) -> dict[str, str]:
    """Return the variables that make a plain `torchrun train.py` join the right group (torchrun reads PET_<option>)."""
    return {
        "PET_NNODES": str(num_nodes),
        "PET_NODE_RANK": str(node_rank),
        "PET_NPROC_PER_NODE": str(procs_per_node),
        "PET_MASTER_ADDR": master_addr,
        "PET_MASTER_PORT": str(master_port),
    }


def drop_unusable_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables without those that exec rejects: one bad name or one long value would keep every rank from
    starting. What is left out of SM_* can still be read in the files."""
    return {
        name: value
        for name, value in variables.items()
        if name and "=" not in name and "\0" not in name + value and _fits_exec(f"{name}={value}")
    }


def _fits_exec(variable: str) -> bool:
    try:
        return len(variable.encode("utf-8", "surrogateescape")) <= MAX_VARIABLE_BYTES
    except UnicodeEncodeError:  # half of a surrogate pair, out of a JSON escape
        return False


def _resource_config(facts: ContractFacts) -> dict[str, Any]:
    return {
        "current_host": facts.current_host,
        "current_instance_type": facts.instance_type,
        "current_group_name": INSTANCE_GROUP,
        "hosts": facts.hosts,
        "instance_groups": [
            {"instance_group_name": INSTANCE_GROUP, "instance_type": facts.instance_type, "hosts": facts.hosts},
        ],
        "network_interface_name": facts.network_interface,
    }


def _training_env(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the toolkit's own view of the same facts, under its property names."""
    same = (
        *("channel_input_dirs", "current_host", "current_instance_group", "current_instance_group_hosts"),
        *("current_instance_type", "framework_module", "hosts", "input_config_dir", "input_data_config", "input_dir"),
        *("instance_groups", "instance_groups_dict", "is_hetero", "log_level", "model_dir", "module_dir"),
        *("module_name", "network_interface_name", "num_cpus", "num_gpus", "num_neurons", "output_data_dir"),
        *("output_dir", "output_intermediate_dir", "resource_config", "user_entry_point"),
    )
    env = {name: values.get(f"SM_{name.upper()}") for name in same}
    env["channel_input_dirs"] = {}
    env["additional_framework_parameters"] = {}
    env["distribution_hosts"] = values["SM_HOSTS"]
    env["distribution_instance_groups"] = []
    env["hyperparameters"] = values["SM_HPS"]
    env["is_master"] = values["SM_CURRENT_HOST"] == "algo-1"
    env["master_hostname"] = "algo-1"
    env["job_name"] = values["TRAINING_JOB_NAME"]
    return env


def _decode_hyperparameter(text: str) -> Any:
    """Return a hyperparameter as JSON when it can be (the toolkit's rule): "10" is a number, "adam" a string."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _user_args(hyperparameters: Mapping[str, Any]) -> list[str]:
    arguments = []
    for name, value in sorted(hyperparameters.items()):
        arguments.append(f"--{name}" if len(name) > 1 else f"-{name}")
        if isinstance(value, dict):
            arguments.append(",".join(f"{k}={v}" for k, v in sorted(value.items())))
        else:
            arguments.append(str(value))
    return arguments


def _entry_point(command: Sequence[str]) -> str | None:
    """Return the script in `python train.py`, else the program."""
    scripts = [word for word in command if word.endswith((".py", ".sh"))]
    return next(iter([*scripts, *command]), None)


def _format_variable(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else encode_json(value)


def encode_json(value: Any) -> str:
    """Return `value` as the contract's files and variables write it."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
