"""`agent.pyz rank -- COMMAND…`: what MPI's daemon starts in the place of a rank.

It hands the command and MPI's variables to the agent, which starts the rank as a child of its own: so an MPI rank has
the same log pipes, exit code and clean-up as any other. This process only stands for the rank towards MPI: it ends with
code 0 when the rank did. When the rank failed it waits: the leader, which now knows the true cause, stops everybody,
before mpirun would kill other ranks and drown that cause. Closing the socket (MPI killed this process) ends the rank.
"""

from __future__ import annotations

import json
import os
import socket
import sys

SOCKET = "EVERSTEP_AGENT_SOCKET"
PASSED_DESCRIPTOR = "PMI_FD"  # Hydra's ranks speak to their proxy over an inherited descriptor


def main(argv: list[str]) -> int:
    command = argv[1:] if argv[:1] == ["--"] else argv
    path = os.environ.get(SOCKET)
    if not path or not command:
        print(f"everstep: rank: needs {SOCKET} and a command: it is started by MPI, not by hand", file=sys.stderr)
        return 2
    request = {
        "op": "rank",
        "argv": command,
        "env": dict(os.environ),
        "cwd": os.getcwd(),  # noqa: PTH109 - pathlib costs every rank its import
        "affinity": sorted(os.sched_getaffinity(0)),
    }
    data = json.dumps(request).encode() + b"\n"
    descriptor = os.environ.get(PASSED_DESCRIPTOR, "")
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as agent:
            agent.connect(path)
            sent = socket.send_fds(agent, [data], [int(descriptor)]) if descriptor else 0
            if descriptor:
                os.close(int(descriptor))  # the rank's end must be the only one, or its exit would go unseen
            agent.sendall(data[sent:])
            with agent.makefile("rb") as answers:
                answer = answers.readline()
    except OSError as error:
        print(f"everstep: rank: no agent at {path}: {error}", file=sys.stderr)
        return 1
    return int(json.loads(answer)["exit"]) if answer else 1
