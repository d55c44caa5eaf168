"""The changes that a cluster makes on the host itself, remembered so that they can be put back."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from e2e.cluster.state import write_atomically

# kubelet writes the first six, whatever its configuration says; three nodes need more inotify instances than the
# usual 128.
SYSCTLS = {
    "vm/overcommit_memory": None,
    "vm/panic_on_oom": None,
    "kernel/panic": None,
    "kernel/panic_on_oops": None,
    "kernel/keys/root_maxkeys": None,
    "kernel/keys/root_maxbytes": None,
    "fs/inotify/max_user_instances": "8192",
    "fs/inotify/max_user_watches": "524288",
}
# Mount points of each node's private folders. Programs have these paths built in.
MOUNT_POINTS = ("/var/lib/kubelet", "/var/lib/cni", "/var/log/pods", "/var/log/containers")


def prepare(folder: Path) -> None:
    """Set what nodes need, after writing down what was there before."""
    record = folder / "host.json"
    if not record.exists():
        before = {name: _sysctl(name).read_text().strip() for name in SYSCTLS if _sysctl(name).exists()}
        made = [path for path in MOUNT_POINTS if not Path(path).exists()]
        write_atomically(record, json.dumps({"sysctls": before, "made": made}))
    for name, value in SYSCTLS.items():
        if value is not None and int(_sysctl(name).read_text()) < int(value):
            _sysctl(name).write_text(value)
    for path in MOUNT_POINTS:
        Path(path).mkdir(parents=True, exist_ok=True)


def restore(folder: Path) -> None:
    """Put back what ``prepare`` found."""
    record = folder / "host.json"
    if not record.exists():
        return
    before = json.loads(record.read_text())
    for name, value in before["sysctls"].items():
        if _sysctl(name).read_text().strip() != value:
            _sysctl(name).write_text(value)
    for path in before["made"]:
        with contextlib.suppress(OSError):  # not empty: someone else uses it by now
            Path(path).rmdir()
    record.unlink()


def _sysctl(name: str) -> Path:
    return Path("/proc/sys") / name
