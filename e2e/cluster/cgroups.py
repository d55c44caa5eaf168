"""The control groups of a node: one for its daemons, one for its pods, both under one that can be frozen.

Works on both versions of the kernel's interface: version 1 has a tree for each controller, version 2 a single one.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from e2e.cluster.waiting import until

MOUNT = Path("/sys/fs/cgroup")
PARENT = "everstep"


def is_unified() -> bool:
    return (MOUNT / "cgroup.controllers").exists()


def hierarchies() -> list[Path]:
    """Return the root of every cgroup tree; links such as ``cpu -> cpu,cpuacct`` count once."""
    if is_unified():
        return [MOUNT]
    return sorted({path.resolve() for path in MOUNT.iterdir() if (path / "cgroup.procs").exists()})


def pods_path(node: str) -> str:
    """Return the name of kubelet's cgroup root."""
    return f"/{PARENT}/{node}/pods"


def create(node: str) -> Path:
    """Make the node's groups; returns the file to which its first process writes its pid."""
    for root in hierarchies():
        group = root
        for part in (PARENT, node, "pods"):
            parent, group = group, group / part
            group.mkdir(exist_ok=True)
            _pass_on(parent, group)
    system = _freezable(node) / "system"
    system.mkdir(exist_ok=True)
    return system / "cgroup.procs"


def freeze(node: str) -> None:
    """Stop every process of the node at once; none of them can notice."""
    _set_frozen(node, True)


def thaw(node: str) -> None:
    _set_frozen(node, False)


def is_frozen(node: str) -> bool:
    group = _freezable(node)
    if not group.exists():
        return False
    if is_unified():
        return "frozen 1" in (group / "cgroup.events").read_text()
    return (group / "freezer.state").read_text().strip() == "FROZEN"


def remove(node: str | None = None) -> None:
    """Remove the groups of a node, or of all nodes, once their last process has gone."""
    for root in hierarchies():
        top = root / PARENT if node is None else root / PARENT / node
        until(lambda top=top: _remove_tree(top), f"cgroup {top} is empty", 20)  # type: ignore[misc]


def _pass_on(parent: Path, group: Path) -> None:
    if is_unified():
        available = (parent / "cgroup.controllers").read_text().split()
        (parent / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in available))
        return
    # A new cpuset is empty, and no process can enter it until it names CPUs and memory nodes.
    for name in ("cpuset.cpus", "cpuset.mems"):
        if (group / name).exists() and not (group / name).read_text().strip():
            (group / name).write_text((parent / name).read_text())


def _freezable(node: str) -> Path:
    root = MOUNT if is_unified() else (MOUNT / "freezer").resolve()
    return root / PARENT / node


def _set_frozen(node: str, frozen: bool) -> None:
    group = _freezable(node)
    if not group.exists():
        return
    if is_unified():
        (group / "cgroup.freeze").write_text("1" if frozen else "0")
    else:
        (group / "freezer.state").write_text("FROZEN" if frozen else "THAWED")
    until(lambda: is_frozen(node) == frozen, f"{node} is {'frozen' if frozen else 'thawed'}", 20)


def _remove_tree(top: Path) -> bool:
    if not top.exists():
        return True
    groups = [path for path in top.rglob("*") if path.is_dir()]
    for group in (*sorted(groups, reverse=True), top):
        with contextlib.suppress(OSError):  # a dying process still holds it: tried again
            group.rmdir()
    return not top.exists()
