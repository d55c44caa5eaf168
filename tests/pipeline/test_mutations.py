"""The comparison with one process detects faults: it fails for each thing that is left out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch")
import torch

from everstep.pipeline.engine.options import EngineOptions
from everstep.pipeline.errors import PipelineError
from everstep.pipeline.schedules import ActionKind, Schedule
from everstep.pipeline.transport.base import Tag, Transport
from tests.pipeline.inprocess import Fabric
from tests.pipeline.models import CASES
from tests.pipeline.training import Setting, Trained, alone, apart, merged, piped, train

pytestmark = pytest.mark.torch

CLOSE = 1e-10  # what test_transparency asks for
ALIKE = EngineOptions(broadcast=False)  # all begin alike anyway, and only gradients are summed over these groups


class Tampered:
    """A transport that does something else with what it is given."""

    def __init__(
        self,
        transport: Any,
        send: Callable[[Any, Tag], Any] = lambda tensor, tag: tensor,
        reduces: Callable[[tuple[int, ...], Any], bool] = lambda group, tensor: True,
    ) -> None:
        self._transport, self._changed, self._reduces = transport, send, reduces

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def send(self, tensor: Any, to: int, tag: Tag) -> Any:
        return self._transport.send(self._changed(tensor, tag), to, tag)

    def all_reduce(self, tensor: Any, group: tuple[int, ...]) -> Any:
        into = tensor if self._reduces(group, tensor) else tensor.clone()
        return self._transport.all_reduce(into, group)


def tampered(setting: Setting, **changes: Any) -> Trained:
    def work(transport: Transport) -> Trained:
        changed: Any = Tampered(transport, **changes)
        return train(setting, changed)

    return merged(Fabric(setting.ranks, setting.replicas).run(work))


def test_nothing_tampered_with_is_close() -> None:
    setting = Setting("gpt", stages=3, ranks=3)
    assert apart(tampered(setting), alone(setting)) < CLOSE


def test_a_tie_that_is_not_summed_is_seen() -> None:
    setting = Setting("gpt", stages=3, ranks=3, options=ALIKE)
    with pytest.raises(PipelineError, match=r"shared parameter 'wte\.weight' is another on ranks 0 and 2"):
        tampered(setting, reduces=lambda group, tensor: group != (0, 2))


def test_the_gradient_of_a_skip_that_does_not_come_back_is_seen() -> None:
    setting = Setting("unet", stages=4, ranks=4)

    def without(tensor: Any, tag: Tag) -> Any:
        return torch.zeros_like(tensor) if tag.gradient and tag.value == "s0" and tag.microbatch == 1 else tensor

    assert apart(tampered(setting, send=without), alone(setting)) > 1e3 * CLOSE


def test_a_reduction_over_replicas_that_is_left_out_is_seen() -> None:
    setting = Setting("mlp", replicas=2, options=ALIKE)
    with pytest.raises(PipelineError, match=r"a parameter of rank \d is another on its replicas"):
        tampered(setting, reduces=lambda group, tensor: len(group) != 2)


def test_a_micro_batch_with_another_weight_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = Setting("gpt", samples=6)
    expected = alone(setting)
    case = CASES["gpt"]
    calls = iter(range(100))

    def loss(outputs: Any, targets: Any) -> Any:
        total, count = case.loss(outputs, targets)
        return total, count + (next(calls) == 1)

    monkeypatch.setitem(CASES, "gpt", replace(case, loss=loss))
    assert apart(piped(setting), expected) > 1e3 * CLOSE


def test_uneven_parts_that_all_weigh_the_same_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    # A mean of means, as libraries have it that divide by the number of micro-batches.
    setting = Setting("mlp", samples=7)
    expected = alone(setting)
    case = CASES["mlp"]

    def loss(outputs: Any, targets: Any) -> Any:
        total, count = case.loss(outputs, targets)
        return total / count, 1

    monkeypatch.setitem(CASES, "mlp", replace(case, loss=loss))
    assert apart(piped(setting), expected) > 1e3 * CLOSE


@pytest.mark.parametrize(
    "kind", [ActionKind.SEND, ActionKind.RECEIVE, ActionKind.TIE, ActionKind.REDUCE, ActionKind.BACKWARD]
)
def test_a_schedule_that_lacks_an_action_is_refused(kind: ActionKind) -> None:
    setting = Setting("gpt", stages=3, ranks=3, replicas=2)

    def without(schedule: Schedule) -> Schedule:
        last = schedule.ranks[-1]
        position = next(index for index, action in enumerate(last) if action.kind is kind)
        return replace(schedule, ranks=(*schedule.ranks[:-1], last[:position] + last[position + 1 :]))

    with pytest.raises(PipelineError, match="1f1b"):
        Fabric(3, 2).run(lambda transport: train(setting, transport, without))
