"""Gradients are summed in buckets, which take their place: they are never there twice."""

from __future__ import annotations

import weakref

import pytest

pytest.importorskip("torch")
import torch
from torch import nn

from everstep.pipeline.engine.reduction import Reduction
from tests.pipeline.inprocess import Fabric, InProcess

pytestmark = pytest.mark.torch

SIZE, COUNT = 1000, 8
BUCKET = 4 * SIZE  # one parameter


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.full((SIZE,), float(number))) for number in range(COUNT)]


def test_a_gradient_ends_when_its_sum_begins() -> None:
    def work(transport: InProcess) -> tuple[list[bool], list[list[float]]]:
        own = parameters()
        group = transport.group([0], replicas=True)
        for number, each in enumerate(own[:-1]):
            each.grad = torch.full((SIZE,), float(number + transport.replica))
        given = [weakref.ref(each.grad) for each in own[:-1]]
        reduction = Reduction(transport, group, {0: own}, {}, {}, BUCKET)
        reduction.reduce(0)
        gone = [each() is None for each in given]
        reduction.finish()
        return gone, [[] if each.grad is None else each.grad.unique().tolist() for each in own]

    for gone, sums in Fabric(1, replicas=2).run(work):
        assert all(gone)
        assert sums == [*([2.0 * number + 1.0] for number in range(COUNT - 1)), []]
