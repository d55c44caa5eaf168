"""The node's GPUs through NVML, always in a child that can be killed: a call into a sick driver may never return."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .processes import ChildProcesses

DRIVER_TIMEOUT_SECONDS = 10.0  # seconds; the first call of a driver without persistence mode loads firmware

# Runs in the image's own Python with its own packages (the agent's interpreter has none: -I -S).
_QUERY = """
import json, sys
try:
    import pynvml as n
except ImportError:
    sys.exit(3)
n.nvmlInit()
def ask(call, *args):
    try:
        return call(*args)
    except n.NVMLError:
        return None
devices = []
text = lambda v: v.decode() if isinstance(v, bytes) else v
for i in range(n.nvmlDeviceGetCount()):
    try:
        h = n.nvmlDeviceGetHandleByIndex(i)
        uuid, name = text(n.nvmlDeviceGetUUID(h)), text(n.nvmlDeviceGetName(h))
    except n.NVMLError as error:  # it has fallen off the bus: the others still answer
        devices.append({"index": i, "error": str(error)})
        continue
    remapped = ask(n.nvmlDeviceGetRemappedRows, h)
    devices.append({
        "index": i, "uuid": uuid, "name": name,
        "ecc_errors": ask(n.nvmlDeviceGetTotalEccErrors, h, 1, 0) or 0,
        "remap_failed": bool(remapped and remapped[3]),
        "pids": [p.pid for p in (ask(n.nvmlDeviceGetComputeRunningProcesses, h) or [])],
    })
print(json.dumps(devices))
"""


@dataclass(frozen=True)
class GpuDevice:
    index: int
    uuid: str = ""  # empty, like all that follows, for a device that does not answer
    name: str = ""
    ecc_errors: int = 0  # uncorrected, since the driver was loaded
    remap_failed: bool = False  # no spare memory rows left: the device must be replaced
    pids: tuple[int, ...] = ()  # as this PID namespace sees them; processes of other containers are not shown
    error: str = ""  # the driver's, in place of an answer

    @property
    def problem(self) -> str:
        """Return why it is not healthy; empty if it is. XIDs are not among it: the driver tells them only as they
        happen."""
        if self.error:
            return self.error
        if self.remap_failed:
            return "no spare memory rows are left"
        return f"{self.ecc_errors} uncorrected memory errors" if self.ecc_errors else ""


class DriverTimeout(Exception):
    """The driver did not answer in time."""


def count_gpus(environ: Mapping[str, str], root: Path = Path("/")) -> int:
    """Return how many GPUs this container has been given, without asking the driver."""
    visible = environ.get("NVIDIA_VISIBLE_DEVICES", "")
    if visible not in ("", "all", "none", "void") and "/" not in visible:
        return len([name for name in visible.split(",") if name])
    # Unset or `all`: an image may say so by itself, on any node. `void` and `none`: so does CDI, which adds the devices
    # by itself. A path: the list is a folder of mounts. The device files tell what is really there.
    try:
        return sum(1 for node in (root / "dev").iterdir() if re.fullmatch(r"nvidia\d+", node.name))
    except OSError:
        return 0


async def query_devices(processes: ChildProcesses, env: Mapping[str, str]) -> list[GpuDevice] | None:
    """Return every GPU and its health; None when it cannot be told: no nvidia-ml-py in the image, or no driver.

    Args:
        processes: Starts the child that asks.
        env: The child's environment.

    Raises:
        DriverTimeout: The driver did not answer within DRIVER_TIMEOUT_SECONDS.
    """
    try:
        # Without stderr: loaders, warnings and debugging aids of the image write there.
        command = [sys.executable, "-c", _QUERY]
        answer = await processes.run(command, env, timeout=DRIVER_TIMEOUT_SECONDS, errors=False)
    except OSError:
        return None
    if answer is None:
        raise DriverTimeout(f"the GPU driver did not answer within {DRIVER_TIMEOUT_SECONDS:g} s")
    if answer[0] != 0:
        return None
    # An image's sitecustomize may print as well, before it and after it.
    lines = [line for line in answer[1].splitlines() if line.startswith(("[{", "[]"))]
    try:
        return [GpuDevice(**{**found, "pids": tuple(found.get("pids", ()))}) for found in json.loads(lines[-1])]
    except (ValueError, TypeError, KeyError, IndexError):
        return None


async def list_device_pids(processes: ChildProcesses, env: Mapping[str, str]) -> list[int]:
    """Return the PIDs that hold a context on any GPU of this container."""
    return sorted({pid for device in await query_devices(processes, env) or [] for pid in device.pids})
