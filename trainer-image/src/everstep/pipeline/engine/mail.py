"""Values and gradients to and from other ranks, in the order of the schedule.

A receiver must know shapes before it can post a receive. They follow from the shapes of the inputs: the first time that
a step has inputs of certain shapes, each value is preceded by a word on its layout; both sides keep it by the inputs'
signature, and later steps post their receives ahead. Gradients have the layout of their values.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from everstep.pipeline.engine.nested import StageValue, ValueLayout
from everstep.pipeline.engine.strides import lay_out
from everstep.pipeline.engine.values import Gradients, Key
from everstep.pipeline.errors import PipelineError
from everstep.pipeline.schedules.actions import Action, ActionKind
from everstep.pipeline.transport.base import Arrival, Tag, Transport, Work

_SIGNATURES = 64  # of inputs whose layouts are kept
_UNDER_WAY = 4  # sends to one rank that are not waited for


@dataclass
class _PostedReceive:
    layout: ValueLayout
    arrivals: list[Arrival]


class P2PMessenger:
    """A messenger that sends values and gradients from one rank to others, and receives theirs.

    Args:
        transport: The transport between the ranks.
        placement: The rank of each stage.
        ahead: The number of receives that may be posted before their turn.
        dynamic: Names of values whose layout is sent each time.
    """

    def __init__(self, transport: Transport, placement: Sequence[int], ahead: int, dynamic: frozenset[str]) -> None:
        self._transport, self._placement, self._ahead, self._dynamic = transport, placement, ahead, dynamic
        self._tables: OrderedDict[str, dict[Key, ValueLayout]] = OrderedDict()
        self._sent: list[deque[tuple[Work, Any]]] = [deque() for _ in range(transport.size)]
        self._receives: deque[Action] = deque()  # not posted yet
        self._coming: dict[tuple[str, int, bool], list[_PostedReceive]] = {}
        self._due = 0  # posted, and their turn has not come
        self._layouts: dict[Key, ValueLayout] = {}
        self._told = False

    def begin(self, actions: Sequence[Action], signature: str) -> None:
        """A step with these actions, whose inputs have this signature, on all ranks."""
        self._told = signature not in self._tables
        self._layouts = self._tables.setdefault(signature, {})
        self._tables.move_to_end(signature)
        if len(self._tables) > _SIGNATURES:
            self._tables.popitem(last=False)
        self._receives = deque(action for action in actions if action.kind is ActionKind.RECEIVE)
        self._due = 0
        self._coming.clear()

    def end(self) -> None:
        """Wait until all that was sent has gone."""
        for sent in self._sent:
            while sent:
                sent.popleft()[0].wait()

    def made(self, name: str, microbatch: int, layout: ValueLayout) -> None:
        """A value of this layout was made here, and will be sent. PipelineError if others expect another layout."""
        known = self._layouts.setdefault((name, microbatch), layout)
        if name in self._dynamic:
            self._layouts[name, microbatch] = layout
        elif not known.agrees(layout):
            raise PipelineError(
                f"value {name!r} (micro-batch {microbatch}) has another layout than before, with inputs of the same "
                f"shapes: {_describe_layout(known)}, now {_describe_layout(layout)}; if it depends on the "
                "data, name it in EngineOptions.dynamic"
            )

    def send(self, action: Action, tensors: Sequence[Any]) -> None:
        """The value or the gradient of a SEND; `tensors` as in its layout, None for a gradient that there is not."""
        to = self._placement[action.peer]
        layout = self._layouts[action.value, action.microbatch]
        if not action.gradient and (self._told or action.value in self._dynamic):
            self._transport.tell(pickle.dumps(layout), to)
        sent = self._sent[to]
        part = 0
        for spec, tensor in zip(layout.specs, tensors, strict=True):
            if action.gradient and not spec.gradient:
                continue
            if tensor is None:
                tensor = torch.zeros(spec.shape, dtype=spec.dtype, device=self._transport.device)
            tag = Tag(action.value, action.microbatch, action.gradient, part)
            tensor = tensor.resolve_conj().resolve_neg().contiguous()  # what is sent is its memory, without such marks
            sent.append((self._transport.send(tensor, to, tag), tensor))
            part += 1
        while len(sent) > _UNDER_WAY:
            sent.popleft()[0].wait()

    def post_ahead(self) -> None:
        """Post the next receives, as far as they are known and allowed."""
        while self._receives and self._due < self._ahead:
            action = self._receives[0]
            if self._told or action.value in self._dynamic:
                return
            self._post(self._receives.popleft())
            self._due += 1

    def receive(self, action: Action) -> None:
        """The turn of a RECEIVE has come: it is posted now, if it was not before."""
        if self._due:
            self._due -= 1
        else:
            assert self._receives[0] == action
            self._post(self._receives.popleft())

    def value(self, name: str, microbatch: int) -> StageValue:
        """A value of another rank, waited for."""
        (coming,) = self._coming.pop((name, microbatch, False))
        layout = coming.layout
        came = [lay_out(each.wait(), spec.strides) for each, spec in zip(coming.arrivals, layout.specs, strict=True)]
        return StageValue(layout, came)

    def gradients(self, name: str, microbatch: int) -> list[Gradients]:
        """Wait for what other ranks contribute to the gradient of a value, and return it."""
        return [
            _unflatten_gradients(coming.layout, [arrival.wait() for arrival in coming.arrivals])
            for coming in self._coming.pop((name, microbatch, True), ())
        ]

    def layout(self, name: str, microbatch: int) -> ValueLayout:
        return self._layouts[name, microbatch]

    def _post(self, action: Action) -> None:
        from_, key = self._placement[action.peer], (action.value, action.microbatch)
        if not action.gradient and (self._told or action.value in self._dynamic):
            self._layouts[key] = pickle.loads(self._transport.hear(from_))  # noqa: S301 - from a rank of this job
        layout = self._layouts[key]
        specs = [spec for spec in layout.specs if spec.gradient or not action.gradient]
        arrivals = [
            self._transport.receive(spec, from_, Tag(*key, action.gradient, part)) for part, spec in enumerate(specs)
        ]
        self._coming.setdefault((*key, action.gradient), []).append(_PostedReceive(layout, arrivals))


def _unflatten_gradients(layout: ValueLayout, tensors: list[Any]) -> Gradients:
    given = iter(tensors)
    return [next(given) if spec.gradient else None for spec in layout.specs]


def _describe_layout(layout: ValueLayout) -> str:
    shapes = ", ".join(f"{tuple(spec.shape)} {spec.dtype}" for spec in layout.specs)
    return f"{shapes} in {layout.structure!r}" if len(layout.specs) != 1 else shapes
