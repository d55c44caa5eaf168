"""Random training programs on pretended GPUs, and what a save of them must hold: the state at its own moment."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

from everstep.checkpoint.state import steps
from tests.checkpoint.pretended_cuda import GpuTensor, on_gpu, pinned, pretended_cuda
from tests.checkpoint.pretended_runtime import Graph, Runtime, Stream, graph

RATE, MOMENTUM = 0.5, 0.5
SIZE = 3


class Part:
    """Two weights and their optimizer on one device, statistics that each forward pass changes, and what the values
    are meant to be."""

    def __init__(self, device: str, made_of: type[torch.optim.SGD] = torch.optim.SGD) -> None:
        self.device = torch.device(device)
        self.params = [torch.nn.Parameter(on_gpu(torch.zeros(SIZE, 2).t(), device)) for _ in range(2)]
        self.statistics = on_gpu(torch.zeros(SIZE), device)
        self.optimizer = made_of(self.params, lr=RATE, momentum=MOMENTUM, foreach=False)
        self.graph: Graph | None = None
        self.weight, self.moment, self.forwards = 0.0, 0.0, 0
        for number, param in enumerate(self.params):
            param.grad = on_gpu(torch.full((2, SIZE), 1.0 + number), device)
        self.step()

    def forward(self) -> None:
        self.statistics.add_(1.0)
        self.forwards += 1

    def step(self) -> None:
        self.optimizer.step()
        self.note_step()

    def note_step(self) -> None:
        self.moment = MOMENTUM * self.moment + 1.0
        self.weight -= RATE * self.moment

    def step_on_a_side_stream(self) -> None:
        side, usual = Stream(self.device), Runtime.current().stream_of(self.device)
        side.wait_stream(usual)
        with Runtime.current().on_stream(side):
            self.step()
        usual.wait_stream(side)

    def capture(self) -> None:
        if self.graph is None:
            self.graph = Graph()
            with torch.cuda.device(self.device), graph(self.graph):
                self.optimizer.step()

    def replay(self) -> None:
        if self.graph is not None:
            with torch.cuda.device(self.device):
                self.graph.replay()
            self.note_step()

    def replace_memory(self) -> None:
        """The weights move to new memory, and the old one goes to whoever asks next."""
        if self.graph is None:
            for param in self.params:
                param.data = param.data.clone()

    def tensors(self) -> list[tuple[torch.Tensor, bool, torch.Tensor]]:
        """With each: whether an optimizer has it, and what it is meant to be."""
        found: list[tuple[torch.Tensor, bool, torch.Tensor]] = [
            (self.statistics, False, torch.full((SIZE,), float(self.forwards)))
        ]
        for number, param in enumerate(self.params):
            found.append((param.detach(), True, torch.full((2, SIZE), (1.0 + number) * self.weight)))
            buffer = self.optimizer.state[param]["momentum_buffer"]
            found.append((buffer, True, torch.full((2, SIZE), (1.0 + number) * self.moment)))
        return found


class Program:
    """A training in one process on two devices, with a script's own copies into pinned memory beside it."""

    def __init__(self, staging: Any) -> None:
        self.parts = [Part("cuda:0"), Part("cuda:1")]
        self.offloaded = pinned(torch.zeros(SIZE))
        self._source = on_gpu(torch.zeros(SIZE))
        self._offloads = 0
        self.staging = staging
        self.expected: list[tuple[torch.Tensor, torch.Tensor]] = []

    def offload(self) -> None:
        self._source.add_(1.0)
        self.offloaded.copy_(self._source, non_blocking=True)
        self._offloads += 1

    def save(self) -> None:
        self.check()
        tensors = [each for part in self.parts for each in part.tensors()]
        tensors.append((self.offloaded, False, torch.full((SIZE,), float(self._offloads))))
        announced = steps.STEPS.are_announced(part.optimizer for part in self.parts)
        targets = [torch.full(meant.shape, -77.0) for _, _, meant in tensors]
        self.expected = [(target, meant) for target, (_, _, meant) in zip(targets, tensors, strict=True)]
        self.staging.copy(targets, [source for source, _, _ in tensors], [announced and kept for _, kept, _ in tensors])

    def check(self) -> None:
        assert self.staging.wait_until_copied(60.0)
        for target, meant in self.expected:
            assert torch.equal(target, meant), f"{target.flatten().tolist()} is not {meant.flatten().tolist()}"

    def run(self, actions: list[tuple[str, int]]) -> None:
        for name, number in actions:
            if name in ("save", "offload"):
                getattr(self, name)()
            else:
                getattr(self.parts[number], name)()
            if Runtime.current().random.random() < 0.3:
                Runtime.current().run_one()
        self.check()
        self.staging.close()
        Runtime.current().run_all()


ACTIONS = ("forward", "step", "step_on_a_side_stream", "capture", "replay", "replace_memory", "save", "offload")
# A loop of a training, mostly: what a save may collide with comes soon after it.
_WEIGHTS = (4, 4, 2, 1, 4, 1, 4, 1)


def random_actions(seed: int, length: int = 30, without: tuple[str, ...] = ()) -> list[tuple[str, int]]:
    """Return a program by its seed."""
    dice = random.Random(seed)
    names = dice.choices(ACTIONS, _WEIGHTS, k=length)
    return [(name, dice.randrange(2)) for name in names if name not in without]


def run_program(seed: int, actions: list[tuple[str, int]], make_staging: Callable[[list[torch.device]], Any]) -> None:
    """Runs a program; AssertionError when a save holds anything but the state at the moment of the save."""
    with pretended_cuda(seed):
        staging = make_staging([torch.device("cuda", 0), torch.device("cuda", 1)])
        Program(staging).run(actions)


__all__ = ["ACTIONS", "GpuTensor", "Part", "Program", "random_actions", "run_program"]
