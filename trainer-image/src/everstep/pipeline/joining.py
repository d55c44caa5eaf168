"""All processes of a job become one pipeline: whoever is silent or fails is named, and all have asked for the same."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import Any

import torch.distributed as dist
from torch import nn

from everstep.pipeline.engine.heartbeat import Heartbeat
from everstep.pipeline.errors import Everywhere
from everstep.pipeline.plan import fingerprint
from everstep.pipeline.schedules import Schedule, dump
from everstep.pipeline.transport.base import TransportError
from everstep.pipeline.transport.control import Control


@contextlib.contextmanager
def watched(control: Control, seconds: float | None) -> Iterator[Heartbeat | None]:
    """Heartbeats of all processes, which go on after it; None without. Inside, a process that fails tells the others
    why, and who waits for one that is lost gets RankLost. Collective."""
    heart = None
    if seconds is not None and dist.get_world_size() > 1:
        heart = Heartbeat(
            dist.get_rank(),
            seconds,
            on_lost=lambda lost: control.abort(str(lost)),
            host=control.address or _host(),
        )
    addresses = control.gather(None if heart is None else heart.address)
    if heart is None or None in addresses:
        if any(addresses):
            raise Everywhere("the ranks do not agree: heartbeat is None on some of them, and not on others")
        yield None
        return
    heart.start(addresses)
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


def agreed(control: Control, model: nn.Module, asked: Mapping[str, Any]) -> None:
    """Everywhere if not all have asked for the same, of the same model. Collective."""
    parameters = fingerprint(
        (name, tuple(each.shape), f"{each.dtype} {each.requires_grad}") for name, each in model.named_parameters()
    )
    modes = fingerprint((name, (), str(each.training)) for name, each in model.named_modules())
    every = control.gather(
        {name: _text(value) for name, value in asked.items()}
        | {
            "the version of everstep": _version(),
            "the model's parameters": parameters[:12],
            "the modes of its modules": modes[:12],
        }
    )
    for name in dict.fromkeys(name for each in every for name in each):
        found = [each.get(name, "not given") for each in every]
        if len(set(found)) > 1:
            other = next(rank for rank, text in enumerate(found) if text != found[0])
            here, there = f"{found[0]} on rank 0", f"{found[other]} on rank {other}"
            raise Everywhere(f"the ranks do not agree on {name}: {here}, {there}; all must call pipeline() alike")


def _version() -> str:
    try:
        return metadata.version("everstep")
    except metadata.PackageNotFoundError:  # its files alone were put into an image
        return "unknown"


def _text(value: Any) -> str:
    if isinstance(value, Schedule):
        return dump(value)
    if isinstance(value, Mapping):
        return repr(sorted((str(key), _text(each)) for key, each in value.items()))
    if isinstance(value, set | frozenset):
        return repr(sorted(map(repr, value)))
    if callable(value):
        return str(getattr(value, "__qualname__", type(value).__qualname__))  # its address is another on each
    return repr(value)


def _host() -> str:
    """The address by which other nodes reach this one: that from which it reaches the first."""
    first = os.environ.get("MASTER_ADDR", "127.0.0.1")
    with contextlib.suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(first, 9, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
    return "127.0.0.1"
