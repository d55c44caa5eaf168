"""Parameters that several processes have: a script that changes one copy otherwise than the others is told.

The copies begin alike and get the same gradients, so they stay alike if all processes treat them alike. They would not
where each process adds random numbers of its own to gradients or weights, or has other options in its optimizer. A few
numbers of each copy, other ones in each step, are added up beside the loss: that costs no message of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from everstep.pipeline.engine.agreement import Disagreement

_SAMPLE = 8  # numbers of a parameter in each step
_AT_ONCE = 2  # parameters of a rank that are compared over replicas in each step
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}  # relative to the largest number; 0.1 for what is narrower
_ADVICE = (
    "something changes them differently, such as random numbers that a script or an optimizer adds, an optimizer's "
    "options by the class of modules, or a learning rate from what one rank alone knows. Give options by names, with "
    "run.groups(lambda name, shape: …), add random numbers to gradients in hooks (parameter.register_hook), which draw "
    "the same for all copies, and do all else alike on all ranks"
)


@dataclass(frozen=True)
class _Place:
    """Parameters of which some processes have copies.

    Attributes:
        what: How a message names it.
        count: How many processes have it.
        own: This process's parameters of it, in the order that all have; none if it has no copy.
    """

    what: str
    count: int
    own: Sequence[Any]


class ParameterCopies:
    """The parameters that several processes have.

    Args:
        shared: Of each shared parameter of the model, the ranks that own it.
        own: The shared parameters of this rank, by name.
        others: The other parameters of this rank.
        rank: The number of this rank in its pipeline.
        ranks: The number of ranks of a pipeline.
        replicas: The number of pipelines.
    """

    def __init__(
        self,
        shared: Mapping[str, Sequence[int]],
        own: Mapping[str, Any],
        others: Sequence[Any],
        rank: int,
        ranks: int,
        replicas: int,
    ) -> None:
        places = []
        for name, owners in sorted(shared.items()):
            where = (
                f"ranks {' and '.join(map(str, owners))}" if len(owners) > 1 else f"the replicas of rank {owners[0]}"
            )
            mine = [own[name]] if rank in owners else []
            places.append(_Place(f"the shared parameter {name!r} is another on {where}", len(owners) * replicas, mine))
        for each in range(ranks if replicas > 1 else 0):
            what = f"a parameter of rank {each} is another on its replicas"
            places.append(_Place(what, replicas, others if each == rank else []))
        self._places = [each for each in places if each.count > 1]

    def add_up(self, add: Callable[[Any], None], step: int, sums: Any) -> None:
        """Add `sums` up over all processes, in place, and compare the copies with the same message.

        Args:
            add: Adds a tensor up over all processes, in place.
            step: The number of the step, by which the numbers to compare are chosen.
            sums: A vector in float64.

        Raises:
            Disagreement: On all ranks, if copies of a parameter differ by more than rounding.
        """
        if not self._places:
            add(sums)
            return
        rows = sums.new_zeros(3, len(self._places), _AT_ONCE, _SAMPLE)
        for at, place in enumerate(self._places):
            for number, parameter in enumerate(_choose(place.own, step)):
                values = _sample(parameter, step)
                own = rows[:, at, number, : len(values)]
                own[0], own[2] = values, _TOLERANCE.get(values.dtype, 0.1)
        torch.mul(rows[0], rows[0], out=rows[1])
        every = torch.cat([sums, rows.view(-1)])
        add(every)
        sums.copy_(every[: len(sums)])
        self._compare(every[len(sums) :].view(rows.shape).cpu())

    def _compare(self, rows: Any) -> None:
        counts = rows.new_tensor([each.count for each in self._places])[:, None, None]
        mean, squares, tolerance = rows / counts
        spread = (squares - mean.square()).clamp(min=0.0).sqrt()
        differs = spread > tolerance * squares.sqrt().amax(-1, keepdim=True)
        if bool(differs.any()):
            at = int(differs.flatten(1).any(1).nonzero()[0])
            raise Disagreement(f"{self._places[at].what}: {_ADVICE}")


def _choose(parameters: Sequence[Any], step: int) -> list[Any]:
    count = min(_AT_ONCE, len(parameters))
    return [parameters[(step * count + number) % len(parameters)] for number in range(count)]


def _sample(parameter: Any, step: int) -> Any:
    """Return a few numbers of a parameter, from all over it; other ones in each step."""
    values = parameter.detach()
    values = (torch.view_as_real(values) if values.is_complex() else values).reshape(-1)
    stride = max(1, len(values) // _SAMPLE)
    return values[step % stride :: stride][:_SAMPLE]
