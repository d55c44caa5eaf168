"""Stands for nvidia-ml-py in the agent's probe, in a process of its own as the real one: the devices are those of the
file $FAKE_NVML, in which a device is {"uuid", "name", "ecc", "remap_failed", "pids"} or {"lost": true}; "hang" stands
for a driver that does not answer."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

Device = dict[str, Any]
_devices: list[Device] = []


class NVMLError(Exception):
    pass


def nvmlInit() -> None:
    state = json.loads(Path(os.environ["FAKE_NVML"]).read_text())
    if state == "hang":
        time.sleep(600)
    _devices[:] = state


def nvmlDeviceGetCount() -> int:
    return len(_devices)


def nvmlDeviceGetHandleByIndex(index: int) -> Device:
    if _devices[index].get("lost"):
        raise NVMLError("GPU is lost")
    return _devices[index]


def nvmlDeviceGetUUID(handle: Device) -> bytes:
    return str(handle["uuid"]).encode()  # older releases answer in bytes


def nvmlDeviceGetName(handle: Device) -> str:
    return str(handle["name"])


def nvmlDeviceGetMemoryInfo(handle: Device) -> SimpleNamespace:
    return SimpleNamespace(used=1 << 30, total=80 << 30)


def nvmlDeviceGetRemappedRows(handle: Device) -> tuple[int, int, bool, bool]:
    return 0, 0, False, bool(handle.get("remap_failed"))


def nvmlDeviceGetTotalEccErrors(handle: Device, kind: int, counter: int) -> int:
    if "ecc" not in handle:
        raise NVMLError("Not Supported")  # consumer devices have no ECC memory
    return int(handle["ecc"])


def nvmlDeviceGetComputeRunningProcesses(handle: Device) -> list[SimpleNamespace]:
    return [SimpleNamespace(pid=pid) for pid in handle.get("pids", [])]
