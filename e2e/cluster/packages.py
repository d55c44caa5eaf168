"""The Debian packages that a local cluster needs, installed when missing."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from e2e.cluster.errors import ClusterError

CNI_PLUGINS = Path("/usr/lib/cni")

# Program or file -> the package that brings it.
CONTROL_PLANE = {"openssl": "openssl", "setpriv": "util-linux"}
NODES = {
    **CONTROL_PLANE,
    "containerd": "containerd",
    "ctr": "containerd",
    "runc": "runc",
    str(CNI_PLUGINS / "bridge"): "containernetworking-plugins",
    "ip": "iproute2",
    "iptables": "iptables",
    "nsenter": "util-linux",
    "mount": "mount",
}


def missing(needed: dict[str, str]) -> list[str]:
    return sorted({package for program, package in needed.items() if shutil.which(program) is None})


def ensure(needed: dict[str, str]) -> None:
    """Install the packages of the programs that this machine lacks."""
    packages = missing(needed)
    if not packages:
        return
    if shutil.which("apt-get") is None or os.geteuid() != 0:
        raise ClusterError(f"please install {', '.join(packages)}: this is not root on a Debian-like system")
    print(f"installing {' '.join(packages)} ...", flush=True)
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (["update", "-qq"], ["install", "-y", "-qq", "--no-install-recommends", *packages]):
        result = subprocess.run(["apt-get", *command], env=environment, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise ClusterError(f"apt-get {command[0]} failed: {result.stderr.strip()[-2000:]}")
    if still := missing(needed):
        raise ClusterError(f"still missing after apt-get: {', '.join(still)}")
