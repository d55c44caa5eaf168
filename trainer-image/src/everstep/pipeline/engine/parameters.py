"""The parameters of a rank: which are shared with other stages, who counts them, and that all begin alike.

A shared parameter has a copy on each rank that owns it, and one master, the rank of its lowest stage, where it is
counted in norms. The copies stay equal since each gets the same sum of gradients.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from everstep.pipeline.engine.between_batches import HeldGradients, UnusedGradients
from everstep.pipeline.engine.copies import ParameterCopies
from everstep.pipeline.engine.options import EngineOptions
from everstep.pipeline.engine.reduction import Reduction
from everstep.pipeline.engine.stage import RunnableStage
from everstep.pipeline.engine.wide import narrow_gradients, widen_gradients
from everstep.pipeline.errors import PipelineError
from everstep.pipeline.graph import StageGraph
from everstep.pipeline.schedules import Action
from everstep.pipeline.transport.base import Transport


class Parameters:
    """The parameters of the stages of this rank.

    Attributes:
        named: The parameters by their names in the whole model.
        own: Each parameter once.
        counted: The parameters that this rank counts for all ranks.
        copies: Those that other processes have too.
    """

    def __init__(
        self,
        stages: Mapping[int, RunnableStage],
        graph: StageGraph,
        placement: Sequence[int],
        transport: Transport,
        data: Any,
        options: EngineOptions,
    ) -> None:
        self._transport, self._data, self._wide = transport, data, options.fp32_gradients
        self._stages, self._placement = stages, placement
        self._owners = dict(graph.ties)
        self.shared = {
            name: _explain_shared_parameter(name, owners, stages)
            for name, owners in graph.ties
            if stages.keys() & set(owners)
        }
        self.named = _collect_named_parameters(stages)
        self.own = list(dict.fromkeys(self.named.values()))
        tied = set(self.shared.values())
        foreign = {
            parameter for name, parameter in self.shared.items() if placement[self._owners[name][0]] != transport.rank
        }
        self.counted = [parameter for parameter in self.own if parameter not in foreign]
        self._groups = {name: self._group(name) for name in sorted(self._owners)}
        by_stage = {
            index: [parameter for parameter in _by_use(stage) if parameter not in tied]
            for index, stage in stages.items()
        }
        _only_once(by_stage)
        self._known = frozenset(map(id, self.own))  # which live as long as this object
        self._learning: list[bool] = []
        self.held, self._unused = HeldGradients(), UnusedGradients()
        self._kept: list[tuple[Callable[[], Any], Mapping[Any, int]]] = []  # what optimizers keep, while they are there
        self.reduction = Reduction(transport, data, by_stage, self.shared, self._groups, options.bucket)
        ranks_of = {name: sorted({placement[stage] for stage in owners}) for name, owners in graph.ties}
        others = [parameter for parameter in self.own if parameter not in tied]
        self.copies = ParameterCopies(ranks_of, self.shared, others, transport.rank, transport.size, transport.replicas)

    def ties_of(self, action: Action) -> list[str]:
        """The shared parameters that a TIE is about: the one that it names, else all of its stage."""
        return [action.value] if action.value else [n for n in self.shared if action.stage in self._owners[n]]

    @property
    def buffers(self) -> dict[str, Any]:
        """Return the buffers of this rank's stages, by their names in the whole model."""
        return {name: buffer for stage in self._stages.values() for name, buffer in stage.module.named_buffers()}

    @property
    def by_original_name(self) -> dict[str, Any]:
        """Each parameter once, under a name that all its owners have for it."""
        names = {parameter: name for name, parameter in reversed(self.named.items())}
        names |= {parameter: name for name, parameter in self.shared.items()}
        return {name: parameter for parameter, name in names.items()}

    @property
    def counted_here(self) -> list[Any]:
        """Return the parameters that this rank counts on this replica: of all replicas, each parameter once."""
        keepers, here = self.reduction.keepers, self._transport.replica
        return [parameter for parameter in self.counted if keepers.get(parameter, 0) == here]

    def keep(self, keepers: Mapping[Any, int], optimizer: Any = None) -> None:
        """Sum the gradients of these parameters for one replica each from now on; they are None on the others.

        In the steps that begin after the `optimizer` is gone, all replicas have them again.
        """
        self._kept.append((weakref.ref(optimizer) if optimizer is not None else lambda: True, keepers))
        self._find_keepers()

    def _find_keepers(self) -> None:
        self._kept = [(there, keepers) for there, keepers in self._kept if there() is not None]
        self.reduction.keepers = {each: keeper for _, keepers in self._kept for each, keeper in keepers.items()}

    @property
    def frozen(self) -> str:
        """Return how many parameters of this rank do not learn, with a short digest of which they are.

        With a `ShardedOptimizer`, the text also has a digest of which replica keeps which parameter.
        """
        flags = bytes(parameter.requires_grad for parameter in self.own)
        count = flags.count(0)
        found = (
            f" with {count} frozen parameters ({hashlib.blake2b(flags, digest_size=3).hexdigest()})" if count else ""
        )
        if keepers := self.reduction.keepers:
            kept = repr([keepers.get(parameter) for parameter in self.own]).encode()
            found += f" with a ShardedOptimizer ({hashlib.blake2b(kept, digest_size=3).hexdigest()})"
        return found

    def check_frozen(self, *, first: bool) -> None:
        """Check before a batch that the same parameters learn as in the first batch of the step, which decides that.

        Raises:
            PipelineError: If a parameter was frozen or unfrozen since the step's first batch, or is not known here.
        """
        for stage in self._stages.values():
            if _holds_another(stage.module, self._known):
                known = set(self.own)
                name = next(
                    name
                    for name, parameter in stage.module.named_parameters()
                    if parameter.requires_grad and parameter not in known
                )
                raise PipelineError(
                    f"parameter {name!r} was added, or put in another's place, after pipeline() was called, as by "
                    "an adapter, a parametrization or fully_shard: its gradient would be neither scaled nor summed "
                    "over replicas. Change the model before pipeline(); there is no FSDP within a stage"
                )
        flags = [parameter.requires_grad for parameter in self.own]
        if first:
            self._learning = flags
            return
        self.held.check(self.named)
        if flags != self._learning:
            place = next(at for at, pair in enumerate(zip(flags, self._learning, strict=True)) if pair[0] != pair[1])
            name = next(name for name, parameter in self.named.items() if parameter is self.own[place])
            raise PipelineError(
                f"parameter {name!r} was {'unfrozen' if flags[place] else 'frozen'} between the batches of one step: "
                "change requires_grad after the call of step() that ends it"
            )

    def forget_gradients(self) -> None:
        """Before a step."""
        self.held.release()
        self._unused.look(self.own)
        for parameter in self.own:
            parameter.grad = None
        self._find_keepers()
        if self._wide:
            widen_gradients(self.own)

    def hold_gradients(self) -> None:
        """After a batch that does not end its step: the next one finds them as they are, or is rejected."""
        self.held.hold(self.named)

    def narrow_gradients(self) -> None:
        """Round gradients to the types that optimizers and hooks expect."""
        if self._wide:
            narrow_gradients(self.own)

    def synchronise(self) -> None:
        """All replicas get weights and buffers of the first, all owners of a shared parameter those of its master."""
        if self._transport.replicas > 1:
            tied = set(self.shared.values())
            tensors = [parameter for parameter in self.own if parameter not in tied]
            for stage in self._stages.values():
                tensors += list(stage.module.buffers())
            for tensor in dict.fromkeys(tensors):
                self._give(tensor.detach(), self._data, self._transport.replica == 0)
        for name in sorted(self.shared):
            if self._groups[name] is not None:
                master = self._placement[self._owners[name][0]]
                from_here = self._transport.replica == 0 and self._transport.rank == master
                self._give(self.shared[name].detach(), self._groups[name], from_here)

    def _give(self, tensor: Any, group: Any, from_here: bool) -> None:
        # As a sum of one and zeros, of bytes: exact, and whatever kind of numbers the transport can add.
        sent = tensor.contiguous().flatten().view(torch.uint8).clone()
        if not from_here:
            sent.zero_()
        self._transport.all_reduce(sent, group).wait()
        tensor.copy_(sent.view(tensor.dtype).view(tensor.shape))

    def _group(self, name: str) -> Any:
        """Return the process group that sums a shared parameter; None if that is this process alone.

        All ranks make the group, owners or not.
        """
        ranks = sorted({self._placement[stage] for stage in self._owners[name]})
        group = self._transport.group(ranks, replicas=True)
        return None if len(ranks) * self._transport.replicas == 1 else group


def _holds_another(root: Any, known: Collection[int]) -> bool:
    """Tell whether a module holds a parameter that learns and is none of these, without making the names of all: this
    is asked before each batch."""
    waiting, seen = [root], {id(root)}
    for module in waiting:
        for parameter in module._parameters.values():
            if parameter is not None and id(parameter) not in known and parameter.requires_grad:
                return True
        for child in module._modules.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                waiting.append(child)
    return False


def _collect_named_parameters(stages: Mapping[int, RunnableStage]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for index, stage in stages.items():
        for name, parameter in stage.module.named_parameters():
            if found.setdefault(name, parameter) is not parameter:
                # Only one of them would be clipped, saved, and cleared before a step.
                raise PipelineError(f"stage {index} has a parameter {name!r} that is another one in an earlier stage")
    return found


def _by_use(stage: RunnableStage) -> list[Any]:
    """Each parameter once, in the order in which the forward first uses it, as far as the stage tells that. Those of
    which it does not come first: gradients are reduced from the end, and none waits for them."""
    every = dict(stage.module.named_parameters(remove_duplicate=False))
    used = dict.fromkeys(every[name] for name in getattr(stage, "uses", ()) if name in every)
    return [*(parameter for parameter in dict.fromkeys(every.values()) if parameter not in used), *used]


def _explain_shared_parameter(name: str, owners: Sequence[int], stages: Mapping[int, RunnableStage]) -> Any:
    found = []
    for index in owners:
        if index in stages:
            parameters = dict(stages[index].module.named_parameters(remove_duplicate=False))
            if name not in parameters:
                raise PipelineError(f"stage {index} owns the shared parameter {name!r}, but its module has none")
            found.append(parameters[name])
    if any(parameter is not found[0] for parameter in found):
        raise PipelineError(f"the stages of one rank that share {name!r} must have it as one tensor, not as copies")
    return found[0]


def _only_once(by_stage: Mapping[int, Sequence[Any]]) -> None:
    seen: dict[Any, int] = {}
    for index, parameters in by_stage.items():
        for parameter in parameters:
            if seen.setdefault(parameter, index) != index:
                raise PipelineError(
                    f"stages {seen[parameter]} and {index} share a parameter of shape {tuple(parameter.shape)} that is "
                    "not listed in the ties of the stage graph"
                )
