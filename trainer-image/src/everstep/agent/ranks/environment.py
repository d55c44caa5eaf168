"""The environment that a rank inherits: the container's without the agent's own, and with what an unknown user
lacks."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import pwd
import re
import shutil
import socket
import struct
from collections.abc import Mapping
from pathlib import Path

from .container_contract import AGENT_VARIABLES

CHECKPOINT_MEMORY_VARIABLE = "EVERSTEP_CHECKPOINT_MEMORY"  # read by the checkpoint library
_SIOCGIFADDR = 0x8915
_MAX_INTERPRETERS, _INTERPRETER_BYTES = 5, 256  # as many, and as much of a first line, as Linux reads
_REFERENCE = re.compile(r"\$\$|\$\(([^)]*)\)")


def build_base_environment(environ: Mapping[str, str], slots: Path | None = None) -> dict[str, str]:
    """Return the environment of every process that the agent starts; ranks get `make_home_variables` besides.

    Args:
        environ: The container's.
        slots: The folder for copies of checkpoints, unless the user's environment names another one; None: there is
            none of the agent's.
    """
    env = {name: value for name, value in environ.items() if name not in AGENT_VARIABLES}
    if slots is not None:
        env.setdefault(CHECKPOINT_MEMORY_VARIABLE, str(slots))
    # A rank that is killed loses what its buffers hold: the very lines that say why.
    env.setdefault("PYTHONUNBUFFERED", "1")
    return env


def expand_references(word: str, variables: Mapping[str, str]) -> str:
    """Return a word of a command as Kubernetes would hand it to the container: in agent mode the command is not the
    container's, and so left to us.

    Args:
        word: `$(NAME)` is replaced if there is such a variable, and left as it is otherwise; `$$` is `$`.
        variables: The container's variables. Those of the image cannot be told apart, and are replaced as well.
    """

    def expand(found: re.Match[str]) -> str:
        return "$" if found.group() == "$$" else variables.get(found.group(1), found.group())

    return _REFERENCE.sub(expand, word)


def read_program(name: str, path: str | None) -> str | None:
    """Find the file that a command runs, and read its start, and that of its interpreter. To execute it is to wait for
    its volume, and the event loop waits with whoever does; this is for a thread.

    Args:
        name: The first word of the command.
        path: The PATH by which it is found; None: the system's own.

    Returns:
        The file; None if there is none.
    """
    # What cannot be read may well be executed, and to open a pipe is to wait for a writer.
    program = None
    with contextlib.suppress(OSError, ValueError):
        program = shutil.which(name, path=os.defpath if path is None else path)
        file = program
        for _ in range(_MAX_INTERPRETERS):
            if file is None or not Path(file).is_file():
                break
            file = read_interpreter(Path(file))
    return program


def read_interpreter(program: Path) -> str | None:
    """Return the interpreter in the first line of a script; None for what is no script.

    Raises:
        OSError: It cannot be read.
    """
    with program.open("rb") as opened:
        start = opened.read(_INTERPRETER_BYTES)
    # Blanks and tabs end it; a carriage return of Windows belongs to it.
    words = start[2:].split(b"\n")[0].replace(b"\t", b" ").strip(b" ").split(b" ") if start.startswith(b"#!") else []
    return os.fsdecode(words[0]) if words and words[0] else None


def make_home_variables(env: Mapping[str, str], scratch: Path) -> dict[str, str]:
    """Return variables for a user that /etc/passwd may not know, as in a restricted pod: `getpass.getuser()` then
    raises (torch.compile calls it), and a HOME of `/` breaks every cache. What somebody set is kept, unless it cannot
    work. Its folders may be on a volume that hangs: this is for a thread."""
    changes: dict[str, str] = {}
    try:
        entry: pwd.struct_passwd | None = pwd.getpwuid(os.getuid())
    except KeyError:
        entry = None
    name = entry.pw_name if entry is not None else "everstep"
    for variable in ("USER", "LOGNAME"):
        if not env.get(variable):
            changes[variable] = name
    home = env.get("HOME") or (entry.pw_dir if entry is not None else "")
    if not _is_writable(home):
        home = _make_folder(scratch / "home")
    if home != env.get("HOME"):
        changes["HOME"] = home
    # The first of Python's tempfile candidates that is set; /tmp is what programs use that never heard of TMPDIR.
    tmpdir = env.get("TMPDIR", "/tmp")  # noqa: S108 - what an unset TMPDIR means
    if not _is_writable(tmpdir):
        changes["TMPDIR"] = _make_folder(scratch / "tmp")
    if (entry is None or "TMPDIR" in changes) and "TORCHINDUCTOR_CACHE_DIR" not in env:
        changes["TORCHINDUCTOR_CACHE_DIR"] = _make_folder(scratch / "inductor")
    return changes


def _is_writable(folder: str) -> bool:
    try:
        return bool(folder) and Path(folder).is_dir() and os.access(folder, os.W_OK | os.X_OK)
    except (OSError, ValueError):  # on a volume that has lost its server, for one
        return False


def _make_folder(path: Path) -> str:
    path.mkdir(parents=True, exist_ok=True)
    return str(path)


def restore_path(theirs: str, ours: str) -> str:
    """Return PATH for a rank: Open MPI puts the folder of mpirun before it, and `python3` there may not be the image's
    own."""
    return ours if theirs.endswith(f":{ours}") else theirs


def count_cpus(root: Path = Path("/")) -> int:
    """Return the CPUs this container may use: its affinity, bounded by its cgroup's quota."""
    allowed = len(os.sched_getaffinity(0))
    cgroup = root / "sys/fs/cgroup"
    with contextlib.suppress(OSError, ValueError, IndexError):
        quota, period = (cgroup / "cpu.max").read_text().split()[:2]
        return max(1, min(allowed, -(-int(quota) // int(period))))
    with contextlib.suppress(OSError, ValueError):
        limit = int((cgroup / "cpu/cpu.cfs_quota_us").read_text())
        if limit > 0:
            return max(1, min(allowed, -(-limit // int((cgroup / "cpu/cpu.cfs_period_us").read_text()))))
    return allowed


def find_interface(address: str) -> str | None:
    """Return the name of the network interface that has this IPv4 address (127.0.0.0/8: the loopback)."""
    try:
        if ipaddress.ip_address(address).is_loopback:
            return "lo"
    except ValueError:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # no IPv4 address
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None


def make_network_variables(address: str, host: str, env: Mapping[str, str]) -> dict[str, str]:
    """Return variables for nodes whose host's name does not stand for their address.

    Gloo looks the name up, and Gloo and NCCL skip the loopback. For nodes that are processes of one machine both are
    wrong. A pod in the network of its node has the node's name, which often stands for the loopback, or for nothing:
    Gloo takes the loopback then, and ranks of other nodes cannot connect.

    Args:
        address: The node's.
        host: The name that its pod has in a network of its own.
        env: The container's environment: an interface that somebody set is kept.
    """
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(address).is_loopback:
            return {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    if socket.gethostname() == host or env.get("GLOO_SOCKET_IFNAME"):
        return {}
    interface = find_interface(address)
    return {"GLOO_SOCKET_IFNAME": interface} if interface is not None else {}
