"""Detects the MPI of an image, and builds its launcher's command (pure functions but for the question itself)."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

SUPPORTED = "Open MPI 4 or 5, MPICH or Intel MPI"


class UnsupportedMpi(RuntimeError):
    """The message says what the image has and what it needs."""


class LauncherRun(NamedTuple):
    """One start of an MPI launcher."""

    mpirun: str
    nodes: int
    procs_per_node: int
    hosts: Sequence[str]  # IP addresses by node index
    interface: str | None
    rsh: str  # path of the program to call in the place of rsh
    rank_command: Sequence[str]
    options: Sequence[str]  # the user's, after ours, so that they win

    @property
    def names(self) -> list[str]:
        """Return the nodes' names. The shim knows nodes by these alone, so nobody needs to resolve them. A pod's own
        host name is among them: there the launcher forks instead of calling the shim."""
        return [f"algo-{i + 1}" for i in range(self.nodes)]

    @property
    def ranks(self) -> int:
        return self.nodes * self.procs_per_node


def detect_flavor(version_output: str) -> str:
    """Return `openmpi4`, `openmpi5` or `hydra`, from what `mpirun --version` prints."""
    found = re.search(r"\(Open MPI\) (\d+)\.", version_output)
    if found:
        major = int(found.group(1))
        if major == 4:
            return "openmpi4"
        if major >= 5:
            return "openmpi5"
    elif "HYDRA" in version_output or "Intel(R) MPI" in version_output:
        return "hydra"
    said = version_output.strip().splitlines()
    raise UnsupportedMpi(f"the image's mpirun is not supported: {said[0] if said else 'no answer'}; use {SUPPORTED}")


def build_command(kind: str, run: LauncherRun) -> tuple[list[str], dict[str, str]]:
    """Return the argv, and the variables that are set unless the image or the user did."""
    return _build_hydra_command(run) if kind == "hydra" else _build_open_mpi_command(kind, run)


def _build_open_mpi_command(kind: str, run: LauncherRun) -> tuple[list[str], dict[str, str]]:
    hosts = ",".join(f"{name}:{run.procs_per_node}" for name in run.names)
    # Else a daemon leaves its session, and the shim sees a success. Version 5 does not take it as a parameter.
    attached = ["--leave-session-attached"] if kind == "openmpi5" else []
    argv = [run.mpirun, "-np", str(run.ranks), "--host", hosts, *attached, *run.options, *run.rank_command]
    network = find_common_network(run.hosts)
    mpi = {
        # In a container, one rank may not read another's memory (process_vm_readv needs a capability).
        "btl_vader_single_copy_mechanism": "none",
        "btl_sm_single_copy_mechanism": "none",  # its name since version 5
        **({"btl_tcp_if_include": network} if network else {}),
    }
    if kind == "openmpi4":
        mpi.update(
            {
                "plm": "rsh",
                "plm_rsh_agent": run.rsh,
                # Otherwise daemons start daemons, through agents that have no link to each other.
                "plm_rsh_no_tree_spawn": "1",
                "plm_rsh_num_concurrent": "4096",
                # Else it looks up every host to see whether it is itself: 40 s for two when no name server answers.
                "if_base_do_not_resolve": "1",
                "orte_leave_session_attached": "1",
                "orte_abort_on_non_zero_status": "1",
                # rank = node * procs + local, as everywhere else here
                "rmaps_base_mapping_policy": "slot",
                "hwloc_base_binding_policy": "none",
                **({"oob_tcp_if_include": network} if network else {}),
            }
        )
        prte: dict[str, str] = {}
    else:
        prte = {
            "plm": "ssh",
            "plm_ssh_agent": run.rsh,
            "plm_ssh_no_tree_spawn": "1",
            "plm_ssh_num_concurrent": "4096",
            "rmaps_default_mapping_policy": "slot",
            "hwloc_default_binding_policy": "none",
            # It never counts the loopback among its interfaces, also when told to.
            **({"prte_if_include": network} if network and not network.startswith("127.") else {}),
        }
    env = {f"OMPI_MCA_{name}": value for name, value in mpi.items()}
    env.update({f"PRTE_MCA_{name}": value for name, value in prte.items()})
    for prefix in ("OMPI", "PRTE"):  # a container's root is not the machine's
        env[f"{prefix}_ALLOW_RUN_AS_ROOT"] = env[f"{prefix}_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
    return argv, env


def _build_hydra_command(run: LauncherRun) -> tuple[list[str], dict[str, str]]:
    hosts = ",".join(f"{name}:{run.procs_per_node}" for name in run.names)
    interface = ["-iface", run.interface] if run.interface else []
    argv = [run.mpirun, "-launcher", "rsh", "-launcher-exec", run.rsh, *interface, "-hosts", hosts]
    # Each node's own environment, not the first one's: paths may differ, and its socket does outside of pods.
    argv += ["-genvnone", "-np", str(run.ranks), "-ppn", str(run.procs_per_node), *run.options, *run.rank_command]
    return argv, {"HYDRA_HOSTNAME_PROPAGATION": "0"}  # else ranks resolve the names of other nodes


def make_idle_variables(ranks_on_node: int, cpus: int) -> dict[str, str]:
    """Return what ranks are told where they share processors, so that one that waits lets another one compute.

    Open MPI waits for messages in a busy loop; its launcher has ranks give way where they are more than the slots that
    it was given, and here these are as many as the ranks. Nothing is said to other kinds of MPI.

    Args:
        ranks_on_node: In this pod.
        cpus: That this pod may use.
    """
    if ranks_on_node <= cpus:
        return {}
    return {"OMPI_MCA_mpi_yield_when_idle": "1"}


def find_common_network(addresses: Sequence[str]) -> str | None:
    """Return the smallest IPv4 network that holds all addresses.

    MPI hands one list of networks to all nodes, and their interfaces may have different names; the network keeps it off
    every bridge that a node has besides.
    """
    try:
        numbers = [int(ipaddress.IPv4Address(address)) for address in addresses]
    except ValueError:
        return None
    length = 32 - (min(numbers) ^ max(numbers)).bit_length()
    return str(ipaddress.ip_network((min(numbers), length), strict=False))


def read_rank(env: Mapping[str, str]) -> tuple[int | None, int | None]:
    """Return (rank, local rank) as MPI's daemon told them to its child."""
    return (
        _read_first_integer(env, "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK"),
        _read_first_integer(env, "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
    )


def read_counts(env: Mapping[str, str]) -> tuple[int | None, int | None]:
    """Return (ranks in all, ranks on this node) as MPI's daemon told them to its child; None for what it did not."""
    return (
        _read_first_integer(env, "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"),
        _read_first_integer(env, "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
    )


def explain_counts(env: Mapping[str, str], nodes: int, procs_per_node: int) -> str | None:
    """Return why mpirun has not started the ranks of the job, as options of the user's may bring about.

    Ranks that are missing somewhere would be waited for without end, and those that are there would be told a world
    that is not theirs.

    Args:
        env: The environment of a rank, from MPI's daemon.
        nodes: The job's nodes.
        procs_per_node: Its ranks on each of them.

    Returns:
        None where they are as many as they should be, or it is not told.
    """
    ranks, local = read_counts(env)
    expected = nodes * procs_per_node
    if ranks in (None, expected) and local in (None, procs_per_node):
        return None
    found = f"{ranks} ranks" if ranks not in (None, expected) else f"{local} ranks on one node"
    return (
        f"mpirun starts {found}, and the job has {expected}, {procs_per_node} on each of {nodes} nodes: remove what "
        "counts or places ranks (-np, -n, --map-by, -npernode, -ppn) from the options of its distribution, or change "
        "numNodes and numProcPerNode"
    )


def _read_first_integer(env: Mapping[str, str], *names: str) -> int | None:
    for name in names:
        if env.get(name, "").isdecimal():
            return int(env[name])
    return None
