"""`agent.pyz rsh HOST COMMAND…`: what an MPI launcher calls in the place of rsh or ssh.

The local agent has the command run by the agent of HOST (`algo-<i+1>`), over connections that exist anyway: no sshd,
no keys, no name resolution. Output and exit code come back as they would from rsh.
"""

from __future__ import annotations

import base64
import json
import os
import socket
import sys

from .rank_command import SOCKET


def main(argv: list[str]) -> int:
    if SOCKET not in os.environ or len(argv) < 2:
        print(f"everstep: rsh: needs {SOCKET}, a host and a command: it is started by mpirun", file=sys.stderr)
        return 2
    host, *words = argv
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as agent:
            agent.connect(os.environ[SOCKET])
            # Like rsh: the words are joined, and a shell over there takes them apart.
            agent.sendall(json.dumps({"op": "rsh", "host": host, "command": " ".join(words)}).encode() + b"\n")
            with agent.makefile("rb") as answers:
                for line in answers:
                    answer = json.loads(line)
                    if "exit" in answer:
                        return int(answer["exit"])
                    stream = sys.stderr if answer["stream"] == "stderr" else sys.stdout
                    stream.buffer.write(base64.b64decode(answer["data"]))
                    stream.flush()
    except OSError as error:
        print(f"everstep: rsh: {host}: {error}", file=sys.stderr)
    return 255  # rsh's own code for a lost connection
