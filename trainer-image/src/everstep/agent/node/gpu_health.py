"""The health of a node's GPUs over time: asks the driver now and then, and tells what has changed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Mapping
from typing import Callable

from everstep.agent.system.gpu import DriverTimeout, GpuDevice
from everstep.agent.wire.protocol import Gpu

PROBE_INTERVAL_SECONDS = 60.0  # seconds between two questions, each of which starts a process
MAX_PROBE_INTERVAL_SECONDS = 600.0  # where nobody can answer, or the driver hangs: its callers may never end
LOST_MESSAGE = "the driver does not show it any more"


async def watch_gpus(
    probe: Callable[[], Awaitable[list[GpuDevice] | None]],
    tell: Callable[[tuple[Gpu, ...]], None],
    every: float = PROBE_INTERVAL_SECONDS,
) -> None:
    """Watch the devices for ever.

    Args:
        probe: Returns the devices, as Supervisor.gpus.
        tell: Called with all devices whenever one of them has changed.
        every: Seconds between two probes.
    """
    known: dict[str, Gpu] = {}
    told: tuple[Gpu, ...] = ()
    pause = every
    while True:
        now: tuple[Gpu, ...] = told
        try:
            devices = await probe()
        except DriverTimeout as error:
            devices = None
            now = tuple(gpu._replace(problem=str(error)) for gpu in known.values())
        if devices is None:
            pause = min(2 * pause, MAX_PROBE_INTERVAL_SECONDS)
        else:
            pause = every
            now = judge_devices(devices, known)
            known.update((gpu.uuid, gpu) for gpu in now if gpu.uuid)
        if now != told:
            told = now
            tell(now)
        await asyncio.sleep(pause)


def judge_devices(devices: Iterable[GpuDevice], known: Mapping[str, Gpu]) -> tuple[Gpu, ...]:
    """Return the devices that were found, and those that were known before but not found, as lost.

    A device that does not answer cannot say which one it is: its error is told of the one that is missed.
    """
    found = [Gpu(d.uuid, d.name, d.problem) for d in devices if d.uuid]
    errors = [d.error for d in devices if not d.uuid]
    here = {gpu.uuid for gpu in found}
    lost = [gpu for uuid, gpu in known.items() if uuid not in here]
    missed = [gpu._replace(problem=errors[i] if i < len(errors) else LOST_MESSAGE) for i, gpu in enumerate(lost)]
    nameless = [Gpu("", "", error) for error in errors[len(lost) :]]
    return (*found, *missed, *nameless)
