"""All processes of a job become one pipeline: whoever is silent or fails is named, and all have asked for the same."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import secrets
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from everstep.coordination.address import find_host_address
from everstep.coordination.arrivals import RollCall
from everstep.coordination.errors import RankLost
from everstep.coordination.heartbeat import Heartbeat
from everstep.pipeline.describe import describe_callable, describe_model
from everstep.pipeline.engine.nested import tensors_of
from everstep.pipeline.errors import Everywhere, PipelineError
from everstep.pipeline.plan import fingerprint_parameters
from everstep.pipeline.prepare import ProcessPosition
from everstep.pipeline.recut import carry_flags, forget_tables
from everstep.pipeline.schedules import Schedule, complete_schedule, dump_schedule
from everstep.pipeline.transport.base import TransportError
from everstep.pipeline.transport.control import Control
from everstep.pipeline.transport.devices import with_index
from everstep.pipeline.transport.grid import make_grid

_log = logging.getLogger("everstep.pipeline")
_PATIENCE = 60.0  # seconds without heartbeats


def meet_processes(roll: RollCall, timeout: float, heartbeat: float | None) -> Control:
    """Make the group of all processes, when all have come here. Collective.

    Args:
        roll: By which the others are known before there is a group.
        timeout: Of each wait, in seconds.
        heartbeat: The seconds after which a process is lost; None without heartbeats.

    Returns:
        The group.

    Raises:
        RankLost: A process did not come in time, or is lost meanwhile.
    """
    if missing := roll.find_missing("came", timeout):
        others = f", nor have ranks {', '.join(map(str, missing[1:]))}" if missing[1:] else ""
        raise RankLost([missing[0]], f"has not called pipeline() within {timeout:g} s{others}")
    with _naming_the_lost(roll, min(timeout, heartbeat or _PATIENCE)):
        return Control(timeout)


@contextlib.contextmanager
def _naming_the_lost(roll: RollCall, seconds: float, control: Control | None = None) -> Iterator[None]:
    """Errors between processes become RankLost, if one of them does not have the error too. No heartbeats are
    there yet."""
    try:
        yield
    except TransportError as error:
        if control is not None:
            control.abort(str(error))  # who waits for this one has the error too
        missing = []
        with contextlib.suppress(RuntimeError):  # the store is gone too: nothing more is known
            missing = roll.find_missing("failed", seconds)
        if not missing:
            raise
        raise RankLost([missing[0]], "ended while pipeline() connected the processes") from error


@contextlib.contextmanager
def watch_processes(control: Control, seconds: float | None, roll: RollCall) -> Iterator[Heartbeat | None]:
    """Heartbeats of all processes, which go on after it; None without. Inside, a process that fails tells the others
    why, and who waits for one that is lost gets RankLost. Collective."""
    heart = None
    if seconds is not None and dist.get_world_size() > 1:
        heart = Heartbeat(
            dist.get_rank(),
            seconds,
            on_lost=lambda lost: control.abort(str(lost)),
            host=control.address or find_host_address(),
        )
    # The key is the first one's: with a collective of its own, one more wait would be without heartbeats.
    with _naming_the_lost(roll, min(control.timeout.total_seconds(), seconds or _PATIENCE), control):
        every = control.gather(None if heart is None else (heart.address, secrets.token_bytes(32)))
    peers = [each for each in every if each is not None]
    if heart is None or len(peers) < len(every):
        if peers:
            raise Everywhere("the ranks do not agree: heartbeat is None on some of them, and not on others")
        yield None
        return
    heart.start([address for address, _ in peers], peers[0][1])
    try:
        heart.joined()
        # The connections of the ring are all there: none of them is taken for one of a group that is made later.
        control.barrier()
        yield heart
    except Everywhere:
        heart.stop()
        raise
    except TransportError as error:
        if (lost := heart.explain()) is not None:
            heart.stop()
            raise lost from error
        heart.fail(error)
        raise
    except BaseException as error:
        heart.fail(error)
        raise


def require_agreement(control: Control, model: nn.Module, asked: Mapping[str, Any]) -> None:
    """Everywhere if not all have asked for the same, of the same model: with modules of the same classes, whose forward
    reads the same plain attributes, but for tables that modules have made in the stages of an earlier cut, which are
    forgotten. Collective."""
    carry_flags(model, control)
    parameters = fingerprint_parameters(
        (name, tuple(each.shape), f"{each.dtype} {each.requires_grad}") for name, each in model.named_parameters()
    )
    modes = fingerprint_parameters((name, (), str(each.training)) for name, each in model.named_modules())
    every = control.gather(
        {name: _format_value(value) for name, value in asked.items()}
        | {
            "the version of everstep": _get_version(),
            "the model's parameters": parameters[:12],
            "the modes of its modules": modes[:12],
        }
    )
    _compare(every)
    described = describe_model(model)
    if len(set(control.gather(hashlib.sha256(repr(described).encode()).digest()))) > 1:
        forget_tables(model, _list_differences(control.gather(described)))
        _compare(control.gather(describe_model(model)))


def _compare(every: Sequence[Mapping[str, str]]) -> None:
    """Raise Everywhere for the first thing of which not all say the same."""
    for name in _list_differences(every):
        found = [each.get(name, "not given") for each in every]
        other = next(rank for rank, text in enumerate(found) if text != found[0])
        here, there = f"{found[0]} on rank 0", f"{found[other]} on rank {other}"
        raise Everywhere(f"the ranks do not agree on {name}: {here}, {there}; all must call pipeline() alike")


def _list_differences(every: Sequence[Mapping[str, str]]) -> list[str]:
    names = dict.fromkeys(name for each in every for name in each)
    return [name for name in names if len({each.get(name) for each in every}) > 1]


def find_place(
    control: Control,
    named: Mapping[str, Any],
    device: torch.device | str | None,
    stages: int | None,
    data_parallel: int | None,
    placement: str,
) -> ProcessPosition:
    """Find the position of this process, without communication with the others.

    Args:
        control: The group of all processes.
        named: The example, by argument names.
        device: The device of this process; None for that of the example.
        stages: The number of stages; None if it is not given.
        data_parallel: The number of replicas; None to derive it from the number of stages.
        placement: `cluster`, `spread`, or an order of the letters D, P and T; see `make_grid`.

    Raises:
        PipelineError: The processes cannot be divided into so many replicas, or the placement is unknown.
    """
    world = dist.get_world_size()
    if data_parallel is None:
        data_parallel = world // stages if stages is not None and stages < world else 1
    if data_parallel < 1 or world % data_parallel:
        raise PipelineError(f"data_parallel: {world} processes cannot be divided into {data_parallel} replicas")
    where = make_grid(world, world // data_parallel, placement)
    if device is None:
        devices = [each.device for each in tensors_of(dict(named)) if each.device.type != "meta"]
        device = devices[0] if devices else "cpu"
        if torch.device(device).type == "cpu" and torch.cuda.is_available():
            _log.warning(
                "the pipeline runs on the CPU, since the example is there: give LayoutOptions(device=…) for the GPU"
            )
    return ProcessPosition(where, control, with_index(device))


def by_nccl(here: ProcessPosition) -> bool:
    """Tell whether tensors go by NCCL: the script's group must have it, and each process a GPU of its own.
    Collective."""
    mine = None
    if here.device.type == "cuda" and "nccl" in dist.get_backend_config():
        mine = str(torch.cuda.get_device_properties(here.device).uuid)
    every = here.control.gather(mine)
    return None not in every and len(set(every)) == len(every)


def check_schedule(schedule: Schedule) -> None:
    """PipelineError if it is not complete, or a rank has nothing to do."""
    complete_schedule(schedule)
    if idle := set(range(len(schedule.ranks))) - set(schedule.placement):
        raise PipelineError(f"schedule {schedule.name}: rank {min(idle)} has no stage; each must have one")


def _get_version() -> str:
    try:
        return metadata.version("everstep")
    except metadata.PackageNotFoundError:  # its files alone were put into an image
        return "unknown"


def _format_value(value: Any) -> str:
    if isinstance(value, Schedule):
        return dump_schedule(value)
    if isinstance(value, Mapping):
        return repr(sorted((str(key), _format_value(each)) for key, each in value.items()))
    if isinstance(value, set | frozenset):
        return repr(sorted(map(repr, value)))
    if callable(value):
        return describe_callable(value)  # its address is another on each
    return repr(value)
