"""Copies of a state that is on GPUs: into pinned slots, while the forward and backward passes go on."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from everstep.checkpoint.errors import CheckpointError
from everstep.checkpoint.save.pinning import PinnedMemory
from everstep.checkpoint.state.memory import get_local_tensor
from everstep.checkpoint.state.staging import Host, Staging
from everstep.checkpoint.state.steps import STEPS, OptimizerSteps

CLOSE_TIMEOUT = 60.0  # seconds that close() waits for the last copy
_SHORTEST, _LONGEST = 50e-6, 5e-3  # seconds between two looks at a copy


class CudaStaging:
    """Copies from GPUs, each on a stream of its own.

    What optimizers hold is next changed by their step: before it the GPU (not this process) waits for the copy. All
    else, as the statistics of a BatchNorm, the next forward pass may change: training's own stream copies it, first.
    Nothing may be called steady once a step may run without Python: see `OptimizerSteps.are_announced`.

    Of the streams that wrote the state only each device's current one is known: copies wait for that one, and it is the
    one that goes on after them. Tensors of main memory are copied on return, those of other accelerators too.
    """

    def __init__(self, devices: Iterable[torch.device], steps: OptimizerSteps = STEPS) -> None:
        """
        Args:
            devices: The CUDA devices of the state; one that appears later gets its stream then.
            steps: What is known of optimizers' steps.
        """
        self._devices = sorted(devices, key=str)
        self._streams = {device: torch.cuda.Stream(device) for device in self._devices}
        self._events: tuple[torch.cuda.Event, ...] = ()  # the last copy's, one for each device
        self._held: tuple[torch.Tensor, ...] = ()  # what it reads: nobody else gets that memory meanwhile
        self._pinned = PinnedMemory()
        self._host = Host()
        self._steps = steps
        self._process = os.getpid()
        self._is_closed = False
        steps.call_before_each(self.wait_for_copy)

    def adopt(self, memory: torch.Tensor) -> None:
        if self._devices:
            self._pinned.register(memory, self._devices[0])

    def copy(
        self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], steady: Sequence[bool] = ()
    ) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise CheckpointError("a save is not possible while a CUDA graph is captured: save after the capture")
        pairs = sort_pairs(targets, sources, steady)
        if any(each.source.is_pinned() for each in pairs.on_host):
            self._wait_for_devices()  # a copy of the script's own may be on its way there
        devices = {pair.source.device for pair in (*pairs.before_training, *pairs.beside_training)}
        try:
            for pair in pairs.before_training:
                _begin_copy(pair)
            for device in devices:
                self._stream(device).wait_stream(torch.cuda.current_stream(device))
            self._begin_beside_training(pairs.beside_training)
        finally:
            # Also after an error: whatever was begun still goes into the slot.
            self._events = tuple(self._record_event(device) for device in devices)
        for pair in pairs.elsewhere:
            pair.target.copy_(pair.source)
        self._host.copy([pair.target for pair in pairs.on_host], [pair.source for pair in pairs.on_host])

    def wait_for_copy(self) -> None:
        events = self._events
        if not events or os.getpid() != self._process:
            return
        if torch.cuda.is_current_stream_capturing():
            self._steps.note_capture()  # a wait in there would be one of the graph, and fail
            return
        for device in tuple(self._streams):
            training = torch.cuda.current_stream(device)
            for event in events:
                training.wait_event(event)

    def is_copied(self) -> bool:
        if not self._events:
            return True
        if torch.cuda.is_current_stream_capturing():
            return False  # asking would end the capture with an error
        try:
            if not all(event.query() for event in self._events):
                return False
        except RuntimeError as error:
            raise CheckpointError(f"a GPU failed while the state was copied from it: {error}") from error
        self._events, self._held = (), ()
        return True

    def wait_until_copied(self, timeout_seconds: float) -> bool:
        until, pause = time.monotonic() + timeout_seconds, _SHORTEST
        while not self.is_copied():
            if time.monotonic() > until:
                return False
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST)
        return True

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._steps.stop_calling(self.wait_for_copy)
        self._host.close()
        if os.getpid() != self._process:
            return  # a forked child: neither the copies nor the pinned memory are its own
        is_idle = False
        try:
            is_idle = self.wait_until_copied(CLOSE_TIMEOUT)
        finally:
            self._pinned.release(is_idle=is_idle)

    def _begin_beside_training(self, pairs: Sequence[Pair]) -> None:
        self._held = tuple(pair.source for pair in pairs)
        for pair in sorted(pairs, key=lambda pair: str(pair.source.device)):
            stream = self._stream(pair.source.device)
            # A storage that is resized to nothing gives its memory back, whoever holds it.
            pair.source.record_stream(stream)
            with torch.cuda.stream(stream):
                _begin_copy(pair)

    def _record_event(self, device: torch.device) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(self._stream(device))
        return event

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]

    def _wait_for_devices(self) -> None:
        for device in {*self._streams, torch.device("cuda", torch.cuda.current_device())}:
            torch.cuda.synchronize(device)


class Pair(NamedTuple):
    """A copy: of the same types and shapes, the target in main memory."""

    target: torch.Tensor
    source: torch.Tensor


class Pairs(NamedTuple):
    """Copies by how they are made."""

    before_training: list[Pair]  # training's own streams copy these before they go on
    beside_training: list[Pair]
    on_host: list[Pair]
    elsewhere: list[Pair]  # on devices that are no GPU of CUDA: by torch, and this process waits


def sort_pairs(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], steady: Sequence[bool] = ()) -> Pairs:
    """Sort copies by how they are made; `steady` as in Staging.copy."""
    pairs = Pairs([], [], [], [])
    for target, source, is_steady in zip(targets, sources, steady or [False] * len(sources), strict=True):
        if source.is_cuda:
            where = pairs.beside_training if is_steady else pairs.before_training
        else:
            where = pairs.on_host if source.is_cpu else pairs.elsewhere
        where.append(Pair(target, source))
    return pairs


def choose_staging(tensors: Sequence[torch.Tensor]) -> Staging:
    """Return the staging for a state: a GPU's where any of it is on one, or in memory that GPUs write into."""
    devices = {tensor.device for tensor in tensors if tensor.is_cuda}
    # Of a DTensor its part: older versions of torch cannot tell whether one as a whole is page-locked.
    here = (get_local_tensor(tensor) for tensor in tensors if tensor.is_cpu)
    if devices or (torch.cuda.is_initialized() and any(tensor.is_pinned() for tensor in here)):
        return CudaStaging(devices)
    return Host()


def _begin_copy(pair: Pair) -> None:
    # As bytes lie in the slot: torch would conjugate in main memory, at once, what is still to come from the GPU.
    source = pair.source.detach().resolve_conj().resolve_neg().contiguous()
    pair.target.copy_(source, non_blocking=True)
