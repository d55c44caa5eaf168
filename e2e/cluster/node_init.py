"""The first process of a node: makes its file system private, starts its daemons, reaps orphans.

It is process 1 of the node's PID namespace: when it is killed the kernel kills all the others, mounts vanish with
the last of them, and the node is gone as if its power had been cut. Run as ``python node_init.py SPEC``, with the
standard library only, so that it starts in an instant.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

RESTART_DELAY = 1.0


def make_private(spec: dict[str, Any]) -> None:
    """Give the node its own host name, /run and folders; containers may still see later mounts of volumes (rshared)."""
    socket.sethostname(spec["hostname"])
    subprocess.run(["mount", "--make-rshared", "/"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", "/run"], check=True)
    for source, target in spec["binds"].items():
        Path(source).mkdir(parents=True, exist_ok=True)
        subprocess.run(["mount", "--bind", source, target], check=True)
    # kubelet reports it: to Kubernetes a node that was switched off and on has rebooted.
    subprocess.run(["mount", "--bind", spec["boot_id"], "/proc/sys/kernel/random/boot_id"], check=True)
    Path(spec["environment"]["TMPDIR"]).mkdir(exist_ok=True)
    os.environ.update(spec["environment"])
    for name, value in spec["sysctls"].items():
        file = Path("/proc/sys") / name
        if file.exists():
            file.write_text(value)


def start(daemon: dict[str, Any]) -> int:
    """Start a daemon, which first waits for the socket of the one it needs."""
    with Path(daemon["log"]).open("ab") as log:
        command = daemon["argv"]
        if daemon["after"]:
            command = ["sh", "-c", 'until [ -S "$0" ]; do sleep 0.05; done; exec "$@"', daemon["after"], *command]
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
    # Waited for below, with all the orphans that are not ours.
    child.returncode = 0
    return child.pid


def supervise(daemons: list[dict[str, Any]]) -> None:
    """Keep the daemons running, as systemd would, and reap whatever ends on this node."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    running = {start(daemon): daemon for daemon in daemons}
    due: list[tuple[float, dict[str, Any]]] = []
    while True:
        signal.sigtimedwait({signal.SIGCHLD}, 0.2 if due else 3600)
        while True:
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            if pid in running:
                due.append((time.monotonic() + RESTART_DELAY, running.pop(pid)))
        now = time.monotonic()
        running.update({start(daemon): daemon for at, daemon in due if at <= now})
        due = [(at, daemon) for at, daemon in due if at > now]


if __name__ == "__main__":
    specification = json.loads(Path(sys.argv[1]).read_text())
    make_private(specification)
    supervise(specification["daemons"])
