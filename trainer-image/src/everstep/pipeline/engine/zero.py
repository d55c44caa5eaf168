"""Optimizer state and gradients spread over the replicas (ZeRO stages 1 and 2, arXiv 1910.02054).

Each parameter of a rank has one replica, its keeper, that gets the sum of its gradients, keeps its optimizer state and
steps it; then all get its new value.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from everstep.pipeline.engine.buckets import by_keeper, make_buckets
from everstep.pipeline.engine.engine import Engine
from everstep.pipeline.errors import PipelineError
from everstep.pipeline.transport.base import Exchange

_AT_ONCE = 2  # buckets that are on their way: with all of them the parameters would be there twice


class ShardedOptimizer:
    """`make(parameters)` builds the optimizer of this replica's share, parameters by their names in the whole model.

    All replicas construct it together, and step it together after each `Engine.step`. It suits optimizers that treat
    each parameter by itself (SGD, Adam and its kin); one that looks at all of them would see its share only.
    `optimizer` is what a checkpoint saves and restores, and what a scheduler takes.

    While it exists, each gradient is summed for the keeper of its parameter alone, which halves what is sent: `grad` is
    None on the other replicas. Parameters that `make` leaves out have their gradients on all replicas, as before. So
    have all, for another optimizer, in the steps after nothing refers to this one any more.
    """

    def __init__(self, engine: Engine, make: Callable[[Mapping[str, Any]], torch.optim.Optimizer]) -> None:
        self._engine, self._transport = engine, engine.transport
        self.owner = assign_owners(
            {name: p.numel() for name, p in _collect_first_names(engine).items()}, self._transport.replicas
        )
        every = _collect_first_names(engine) or {
            "none": torch.zeros((), device=self._transport.device, requires_grad=True)
        }
        mine = {n: p for n, p in every.items() if self.owner.get(n) == self._transport.replica}
        # torch makes no optimizer of nothing, but keeps one from which all was taken: it has the groups of the others.
        self.optimizer = make(mine or dict(list(every.items())[:1]))
        for group in () if mine else self.optimizer.param_groups:
            group["params"] = []
        if self._transport.replicas > 1:
            with engine.aborting():
                engine.parameters.keep(self._kept(), self)

    def _kept(self) -> dict[Any, int]:
        """The parameters that an optimizer of any replica steps, and that replica."""
        stepped = {each for group in self.optimizer.param_groups for each in group["params"]}
        named = _collect_first_names(self._engine)
        flags = torch.zeros(len(named), device=self._transport.device)
        for place, (name, parameter) in enumerate(named.items()):
            flags[place] = float(parameter in stepped and self.owner[name] == self._transport.replica)
        if named:
            self._transport.all_reduce(flags, self._engine.data).wait()
        return {p: self.owner[name] for (name, p), flag in zip(named.items(), flags.tolist(), strict=True) if flag}

    def step(self) -> None:
        """Take one step on this replica's share, whose new values go to all replicas.

        It raises the errors of `Engine.step`, and PipelineError if a parameter learns that did not when this was made.
        """
        if unknown := sorted(_collect_first_names(self._engine).keys() - self.owner.keys()):
            raise PipelineError(
                f"parameter {unknown[0]!r} was unfrozen after the ShardedOptimizer was made, and no replica steps it: "
                "make it while all that shall ever learn requires gradients, and freeze them after it"
            )
        self.optimizer.step()
        if self._transport.replicas > 1:
            self._engine.passes += 1
            with self._engine.aborting():
                self._share()

    def _share(self) -> None:
        owner = {parameter: self.owner[name] for name, parameter in _collect_first_names(self._engine).items()}
        replicas, mine = range(self._transport.replicas), self._transport.replica
        under_way: deque[tuple[list[list[Any]], Exchange]] = deque()
        for bucket in make_buckets(list(owner), self._engine.options.bucket):
            shares_of_it = by_keeper(bucket, owner, len(replicas))
            own = torch.cat([bucket[0].new_empty(0), *(p.detach().reshape(-1) for p in shares_of_it[mine])])
            nothing = own[:0]
            given = [nothing if replica == mine else own for replica in replicas]
            sizes = [0 if r == mine else sum(p.numel() for p in shares_of_it[r]) for r in replicas]
            under_way.append((shares_of_it, self._transport.exchange(given, sizes, self._engine.data)))
            if len(under_way) == _AT_ONCE:
                _copy_from_bucket(*under_way.popleft(), mine)
        for each in under_way:
            _copy_from_bucket(*each, mine)


def _copy_from_bucket(shares_of_it: Sequence[list[Any]], work: Exchange, mine: int) -> None:
    for replica, (share, values) in enumerate(zip(shares_of_it, work.wait(), strict=True)):
        if replica != mine:
            for parameter, part in zip(share, values.split([p.numel() for p in share]), strict=True):
                parameter.detach().copy_(part.view(parameter.shape))


def assign_owners(sizes: Mapping[str, int], replicas: int) -> dict[str, int]:
    """Return the replica that keeps each parameter, so that each replica keeps about as much.

    The largest parameter comes first, and goes to the replica that has least.

    Args:
        sizes: The size of each parameter by name.
        replicas: The number of replicas.
    """
    kept = [0] * replicas
    found = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        replica = kept.index(min(kept))
        kept[replica] += sizes[name]
        found[name] = replica
    return found


def _collect_first_names(engine: Engine) -> dict[str, Any]:
    """The parameters of this rank, each under its first name."""
    seen: dict[Any, str] = {}
    for name, parameter in engine.parameters.named.items():
        seen.setdefault(parameter, name)
    return {name: parameter for parameter, name in seen.items() if parameter.requires_grad}
