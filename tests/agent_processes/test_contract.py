"""The container contract, byte by byte."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest

from everstep.agent.launch import none, torch
from everstep.agent.launch.launcher import Launcher, count_ranks_on_node
from everstep.agent.launch.mpi_flavors import (
    LauncherRun,
    UnsupportedMpi,
    build_command,
    detect_flavor,
    find_common_network,
    make_idle_variables,
    read_rank,
)
from everstep.agent.ranks import environment
from everstep.agent.ranks.container_contract import (
    MAX_VARIABLE_BYTES,
    ContractFacts,
    build_contract_files,
    build_sm_environment,
    drop_unusable_variables,
)
from everstep.agent.ranks.contract_files import write_contract_files
from everstep.agent.ranks.environment import count_cpus, restore_path
from everstep.agent.system.gpu import count_gpus
from everstep.agent.wire.generation_layout import GenerationLayout


def facts(**changes: object) -> ContractFacts:
    values: dict[str, object] = {
        "job": "digits",
        "hyperparameters": {"epochs": "10", "lr": "0.1", "optimizer": "adam", "layers": "[64, 32]"},
        "num_nodes": 2,
        "node_index": 1,
        "instance_type": "on-demand",
        "command": ("python", "train.py"),
        "num_cpus": 4,
        "num_gpus": 1,
        "master_addr": "10.1.0.4",
        "master_port": 29500,
    }
    return ContractFacts(**{**values, **changes})  # type: ignore[arg-type]


def test_the_files_are_sagemakers() -> None:
    assert build_contract_files(facts()) == {
        "/opt/ml/input/config/hyperparameters.json": (
            b'{"epochs":"10","layers":"[64, 32]","lr":"0.1","optimizer":"adam"}'
        ),
        "/opt/ml/input/config/resourceconfig.json": (
            b'{"current_group_name":"homogeneousCluster","current_host":"algo-2",'
            b'"current_instance_type":"on-demand","hosts":["algo-1","algo-2"],'
            b'"instance_groups":[{"hosts":["algo-1","algo-2"],"instance_group_name":"homogeneousCluster",'
            b'"instance_type":"on-demand"}],"network_interface_name":"eth0"}'
        ),
        "/opt/ml/input/config/inputdataconfig.json": b"{}",
    }


def test_the_variables_are_sagemakers() -> None:
    group = '{"hosts":["algo-1","algo-2"],"instance_group_name":"homogeneousCluster","instance_type":"on-demand"}'
    resource_config = build_contract_files(facts())["/opt/ml/input/config/resourceconfig.json"].decode()
    env = build_sm_environment(facts())
    training_env = json.loads(env.pop("SM_TRAINING_ENV"))
    assert env == {
        "SM_HOSTS": '["algo-1","algo-2"]',
        "SM_CURRENT_HOST": "algo-2",
        "SM_HOST_COUNT": "2",
        "SM_CURRENT_HOST_RANK": "1",
        "SM_MASTER_ADDR": "10.1.0.4",
        "SM_MASTER_PORT": "29500",
        "SM_NETWORK_INTERFACE_NAME": "eth0",
        "SM_CURRENT_INSTANCE_TYPE": "on-demand",
        "SM_CURRENT_INSTANCE_GROUP": "homogeneousCluster",
        "SM_CURRENT_INSTANCE_GROUP_HOSTS": '["algo-1","algo-2"]',
        "SM_INSTANCE_GROUPS": '["homogeneousCluster"]',
        "SM_INSTANCE_GROUPS_DICT": f'{{"homogeneousCluster":{group}}}',
        "SM_DISTRIBUTION_INSTANCE_GROUPS": "[]",
        "SM_IS_HETERO": "false",
        "SM_RESOURCE_CONFIG": resource_config,
        "SM_INPUT_DATA_CONFIG": "{}",
        "SM_CHANNELS": "[]",
        "SM_HPS": '{"epochs":10,"layers":[64,32],"lr":0.1,"optimizer":"adam"}',
        "SM_USER_ARGS": '["--epochs","10","--layers","[64, 32]","--lr","0.1","--optimizer","adam"]',
        "SM_USER_ENTRY_POINT": "train.py",
        "SM_FRAMEWORK_PARAMS": "{}",
        "SM_FRAMEWORK_MODULE": "",
        "SM_MODULE_NAME": "",
        "SM_MODULE_DIR": "",
        "SM_LOG_LEVEL": "20",
        "SM_NUM_CPUS": "4",
        "SM_NUM_GPUS": "1",
        "SM_NUM_NEURONS": "0",
        "SM_MODEL_DIR": "/opt/ml/model",
        "SM_INPUT_DIR": "/opt/ml/input",
        "SM_INPUT_CONFIG_DIR": "/opt/ml/input/config",
        "SM_INPUT_DATA_DIR": "/opt/ml/input/data",
        "SM_OUTPUT_DIR": "/opt/ml/output",
        "SM_OUTPUT_DATA_DIR": "/opt/ml/output/data",
        "SM_OUTPUT_INTERMEDIATE_DIR": "/opt/ml/output/intermediate",
        "SM_OUTPUT_FAILURE": "/opt/ml/output/failure",
        "TRAINING_JOB_NAME": "digits",
        "SM_HP_EPOCHS": "10",
        "SM_HP_LAYERS": "[64,32]",
        "SM_HP_LR": "0.1",
        "SM_HP_OPTIMIZER": "adam",
    }
    assert training_env["hyperparameters"] == {"epochs": 10, "layers": [64, 32], "lr": 0.1, "optimizer": "adam"}
    assert (training_env["current_host"], training_env["is_master"]) == ("algo-2", False)


def test_hosts_are_in_lexicographic_order() -> None:
    env = build_sm_environment(facts(num_nodes=11, node_index=9))
    assert json.loads(env["SM_HOSTS"])[:4] == ["algo-1", "algo-10", "algo-11", "algo-2"]
    assert (env["SM_CURRENT_HOST"], env["SM_CURRENT_HOST_RANK"]) == ("algo-10", "1")


def test_links_in_a_shared_volume_stay_as_they_are_and_take_the_place_of_files_of_before(tmp_path: Path) -> None:
    shared, said = tmp_path / "hyperparameters.json", list[str]()
    shared.write_text("of a former version")
    for data in (b"1", b"2"):
        write_contract_files({str(shared): data}, tmp_path / "own", said.append)
        assert (shared.readlink(), shared.read_bytes()) == (tmp_path / "own" / shared.name, data)
    assert sorted(path.name for path in tmp_path.iterdir()) == [shared.name, "own"]
    assert not said


def test_a_volume_that_takes_no_links_has_the_files_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, target: Path) -> None:
        raise OSError(errno.EIO, "no links here", str(self))

    monkeypatch.setattr(Path, "symlink_to", refuse)
    path, said = tmp_path / "hyperparameters.json", list[str]()
    write_contract_files({str(path): b"1"}, tmp_path / "own", said.append)
    assert path.read_bytes() == b"1"
    assert not path.is_symlink()
    assert "takes no links" in said[0]


def test_no_hyperparameter_can_keep_a_rank_from_starting() -> None:
    odd = {
        "a=b": "1",
        "nul": "x\0y",
        "long": "x" * MAX_VARIABLE_BYTES,
        "half": "\ud800",
        "deep": "[" * 100_000,
        "k": "v",
    }
    env = build_sm_environment(facts(hyperparameters=odd))
    assert {name for name in env if name.startswith("SM_HP_")} == {"SM_HP_DEEP", "SM_HP_K"}
    assert all(drop_unusable_variables({name: value}) for name, value in env.items())
    assert build_contract_files(facts(hyperparameters=odd))


def layout(nodes: int, procs: int, node: int) -> GenerationLayout:
    hosts = tuple(f"10.0.0.{i + 1}" for i in range(nodes))
    return GenerationLayout(1, 1, hosts, (8470,) * nodes, node, procs, hosts[0], 29500)


@pytest.mark.parametrize("procs", range(1, 5))
@pytest.mark.parametrize("nodes", range(1, 9))
def test_every_rank_exists_once(nodes: int, procs: int) -> None:
    found = [p for node in range(nodes) for p in torch.place_ranks(layout(nodes, procs, node))]
    assert [p.rank for p in found] == list(range(nodes * procs))
    assert [p.local_rank for p in found] == list(range(procs)) * nodes
    assert {(p.world_size, p.local_world_size) for p in found} == {(nodes * procs, procs)}
    alone = [p for node in range(nodes) for p in none.place_ranks(layout(nodes, procs, node))]
    assert [(p.rank, p.local_rank, p.world_size, p.local_world_size) for p in alone] == [
        (node, 0, nodes, 1) for node in range(nodes)
    ]
    launchers: dict[str, Launcher] = {"torch": torch, "none": none}
    for name, launcher in launchers.items():
        assert len(launcher.place_ranks(layout(nodes, procs, 0))) == count_ranks_on_node(name, procs)


@pytest.mark.parametrize(
    ("output", "kind"),
    [
        ("mpirun (Open MPI) 4.1.4\n\nReport bugs to http://www.open-mpi.org/community/help/", "openmpi4"),
        ("mpirun (Open MPI) 5.0.11\n", "openmpi5"),
        ("HYDRA build details:\n    Version:                                 5.0.2\n", "hydra"),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.13 Build 20240701\n", "hydra"),
    ],
)
def test_mpis_are_told_apart(output: str, kind: str) -> None:
    assert detect_flavor(output) == kind


@pytest.mark.parametrize("output", ["mpirun (Open MPI) 3.1.6\n", "", "something else"])
def test_other_mpis_are_refused_with_the_supported_ones(output: str) -> None:
    with pytest.raises(UnsupportedMpi, match="use Open MPI 4 or 5, MPICH or Intel MPI"):
        detect_flavor(output)


def test_the_users_options_come_last_and_the_image_wins_over_our_parameters() -> None:
    run = LauncherRun("mpirun", 2, 4, ("10.1.0.4", "10.1.3.9"), "eth0", "/run/everstep/rsh", ("rank",), ("-x", "A=1"))
    argv, env = build_command("openmpi4", run)
    assert argv == ["mpirun", "-np", "8", "--host", "algo-1:4,algo-2:4", "-x", "A=1", "rank"]
    assert env["OMPI_MCA_btl_tcp_if_include"] == "10.1.0.0/22"
    assert env["OMPI_MCA_plm_rsh_agent"] == "/run/everstep/rsh"


@pytest.mark.parametrize(
    ("addresses", "network"),
    [
        (["10.1.0.4"], "10.1.0.4/32"),
        (["10.1.0.4", "10.1.0.5", "10.1.0.6"], "10.1.0.4/30"),
        (["127.0.0.1", "127.0.0.2"], "127.0.0.0/30"),
        (["fd00::1"], None),
    ],
)
def test_the_common_network_holds_every_address(addresses: list[str], network: str | None) -> None:
    assert find_common_network(addresses) == network


def test_mpis_own_numbers_are_read() -> None:
    assert read_rank({"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "1", "PMIX_RANK": "3"}) == (3, 1)
    assert read_rank({"PMI_RANK": "5", "MPI_LOCALRANKID": "0"}) == (5, 0)
    assert read_rank({"PMI_RANK": "x"}) == (None, None)


def test_gpus_are_counted_without_the_driver(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    assert count_gpus({}, tmp_path) == 2
    assert count_gpus({"NVIDIA_VISIBLE_DEVICES": "all"}, tmp_path) == 2
    assert count_gpus({"NVIDIA_VISIBLE_DEVICES": "GPU-1,GPU-2,GPU-3"}, tmp_path) == 3
    for by_itself in ("void", "none", "/var/run/nvidia-container-devices"):  # CDI; device lists as mounts
        assert count_gpus({"NVIDIA_VISIBLE_DEVICES": by_itself}, tmp_path) == 2
    for node in (tmp_path / "dev").glob("nvidia?"):
        node.unlink()
    assert count_gpus({"NVIDIA_VISIBLE_DEVICES": "void"}, tmp_path) == 0


def test_cpus_are_those_of_the_quota(tmp_path: Path) -> None:
    cgroup = tmp_path / "sys/fs/cgroup"
    cgroup.mkdir(parents=True)
    unlimited = count_cpus(tmp_path)
    (cgroup / "cpu.max").write_text("max 100000\n")
    assert count_cpus(tmp_path) == unlimited
    (cgroup / "cpu.max").write_text("50000 100000\n")
    assert count_cpus(tmp_path) == 1


def test_below_mpirun_programs_are_found_as_in_the_image() -> None:
    ours = "/opt/venv/bin:/usr/bin"
    assert restore_path(f"/usr/bin:{ours}", ours) == ours
    assert restore_path(ours, ours) == ours
    assert restore_path("/somebody/else/says", ours) == "/somebody/else/says"


def test_ranks_that_share_processors_give_way_while_they_wait() -> None:
    assert make_idle_variables(ranks_on_node=4, cpus=4) == {}
    assert make_idle_variables(ranks_on_node=4, cpus=3) == {"OMPI_MCA_mpi_yield_when_idle": "1"}


@pytest.mark.parametrize(
    ("address", "name", "env", "expected"),
    [
        ("10.0.0.5", "algo-2", {}, {}),
        ("10.0.0.5", "worker-7", {}, {"GLOO_SOCKET_IFNAME": "bond0"}),
        ("10.0.0.5", "worker-7", {"GLOO_SOCKET_IFNAME": "ib0"}, {}),
        ("10.0.0.6", "worker-7", {}, {}),
        ("127.0.0.2", "laptop", {}, {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}),
    ],
)
def test_gloo_is_told_its_interface_where_the_hosts_name_is_not_the_pods(
    monkeypatch: pytest.MonkeyPatch, address: str, name: str, env: dict[str, str], expected: dict[str, str]
) -> None:
    """A pod with `hostNetwork` has the node's name, which may stand for the loopback or for nothing."""
    monkeypatch.setattr(environment, "find_interface", {"10.0.0.5": "bond0"}.get)
    monkeypatch.setattr("socket.gethostname", lambda: name)
    assert environment.make_network_variables(address, "algo-2", env) == expected
