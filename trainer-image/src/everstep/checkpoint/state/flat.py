"""All objects of a run as one flat state: `{name: tensor}` and `{name: value}`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from everstep.checkpoint.errors import CheckpointError
from everstep.checkpoint.format.values import check_size, pack_value
from everstep.checkpoint.state import names
from everstep.checkpoint.state.bulk import is_bulk, to_tensor
from everstep.checkpoint.state.copied_states import explain_copied_state
from everstep.checkpoint.state.kinds import FromRank, ObjectKind, PerRank, Stateful, is_tensor, unwrap_marked
from everstep.checkpoint.state.loaded import is_dtensor
from everstep.checkpoint.state.loader_samplers import is_loader
from everstep.checkpoint.state.memory import get_local_tensor, is_of_own_class, why_not_saved
from everstep.checkpoint.state.modules import Modules
from everstep.checkpoint.state.optimizers import OptimizerObject
from everstep.checkpoint.state.other_states import has_usual_state
from everstep.checkpoint.state.param_holders import find_holders
from everstep.checkpoint.state.plain import StatefulObject, StateValue
from everstep.checkpoint.state.rng import Rng
from everstep.checkpoint.state.steps import has_hooked_steps
from everstep.checkpoint.state.zero_redundancy import ZeroRedundancyObject, is_zero_redundancy

__all__ = [
    "RANK",
    "Flat",
    "bind_kinds",
    "flatten_objects",
    "get_local_tensor",
    "of_optimizers",
    "predict_optimizer_tensors",
]

RANK = "rank"

_NUMBERS = frozenset({int, float, bool, type(None)})
_LARGEST_UNPLANNED = 16 << 20  # bytes of an array that is saved as a value when it has another size than was planned


@dataclass(frozen=True)
class Flat:
    """Tensors (or DTensors), detached, on any device, sharing the objects' storage; values packed for the manifest.

    `elsewhere`: names of tensors that another rank's are saved for: see FromRank, and DDP's buffers.
    `classes`: of tensors of nested values and objects, by their names: those that the checkpoint does not record.
    `left_out`: names of what this rank holds and another one saves: see ReceivedLeaves.
    `shards`: names of DTensors of nested values and objects: the checkpoint does not record how they are laid out.
    """

    tensors: dict[str, torch.Tensor]
    values: dict[str, object]
    bulk: dict[str, Any] = field(default_factory=dict)  # arrays and bytes whose bytes are tensors here, as they are
    elsewhere: frozenset[str] = frozenset()
    classes: Mapping[str, str] = field(default_factory=dict)
    left_out: frozenset[str] = frozenset()
    shards: frozenset[str] = frozenset()

    def fitted(
        self, planned: Mapping[str, tuple[Any, ...]], bulk: Collection[str], sign: Callable[[Any], Mapping[str, Any]]
    ) -> Flat:
        """Return the same state for a plan that was made when arrays had other sizes: they go as values this time.

        A large one does not: for that, a new plan is worth its time.

        Args:
            planned: The signature that the plan was made for.
            bulk: Names of its tensors that were bytes of arrays then, and of what was left out.
            sign: Makes a signature of tensors.
        """
        now = sign({name: self.tensors[name] for name in self.bulk})
        others = {name for name in self.bulk if now[name] != planned.get(name)}
        # Another rank saves such an array as was planned: as a value, this rank's would contradict it.
        if any(name in bulk and name not in planned for name in others):
            return self
        gone = {name for name in bulk if name not in self.bulk or name in others} & planned.keys()
        if any(self.tensors[name].nbytes > _LARGEST_UNPLANNED for name in others):
            return self
        # What fills the place of an array in the plan is passed over by a reader where a value has its name, and only
        # there: a tensor, a dictionary, None or nothing needs a plan of its own.
        if any(self.values.get(name) is None for name in gone - others):
            return self
        tensors = {name: tensor for name, tensor in self.tensors.items() if name not in others}
        for name in gone:
            dtype, shape, *_ = planned[name]
            tensors[name] = torch.zeros(shape, dtype=dtype, device="cpu")
        values = {**self.values, **{name: pack_value(self.bulk[name], name) for name in others}}
        kept = {name: each for name, each in self.bulk.items() if name not in others}
        return replace(self, tensors=tensors, values=values, bulk=kept)


def flatten_objects(
    objects: Mapping[str, object], *, rank: int, step: int | None = None, allow_pickle: bool = False
) -> Flat:
    """Return the state of all objects at this moment.

    Args:
        step: How many steps are trained, for objects whose state follows from it.

    Raises:
        UnsupportedValue: A value cannot be saved.
        CheckpointError: An object cannot be saved.
    """
    tensors: dict[str, torch.Tensor] = {}
    values: dict[str, object] = {}
    bulk: dict[str, Any] = {}
    elsewhere: set[str] = set()
    classes: dict[str, str] = {}
    shards: set[str] = set()
    sources = {names.escape_segment(name): each.rank for name, each in objects.items() if isinstance(each, FromRank)}
    for kind in bind_kinds(objects, rank=rank, step=step):
        follows = sources.get(kind.prefix, rank) != rank
        if isinstance(kind, Modules) and not kind.prefix.startswith(f"{RANK}.") and kind.prefix not in sources:
            elsewhere.update(kind.broadcast_from_others())
        for name, leaf in _leaves_of(kind):
            if follows and not is_dtensor(leaf):
                elsewhere.add(name)
            if name in tensors or name in values:
                raise CheckpointError(
                    f"{name}: two objects have a state of this name. The modules of a list are the parts of one model; "
                    "give each of several models a name of its own, as generator=..., critic=..."
                )
            if follows and not is_tensor(leaf):
                continue
            if type(leaf) in _NUMBERS:
                values[name] = pack_value(leaf)  # of which a table may have many
            elif is_bulk(leaf):
                tensors[name], described = to_tensor(leaf)
                values[name] = pack_value(described)
                bulk[name] = leaf
            elif not is_tensor(leaf):
                values[name] = pack_value(leaf, name, allow_pickle=allow_pickle)
                check_size(values[name], name)
            elif why := why_not_saved(leaf):
                raise CheckpointError(f"{name} {why}")
            else:
                tensors[name] = leaf
                # A module and an optimizer are made by the script, with tensors of their classes.
                if isinstance(kind, StateValue | StatefulObject):
                    if is_of_own_class(leaf):
                        classes[name] = type(leaf).__name__
                    if is_dtensor(leaf):
                        shards.add(name)
        if isinstance(kind, StateValue) and not kind.takes_in:  # it can be saved, as every number can
            raise CheckpointError(_tell_immutable(kind.prefix, kind.value))
    return Flat(tensors, values, bulk, frozenset(elsewhere & tensors.keys()), classes, shards=frozenset(shards))


def _leaves_of(kind: ObjectKind) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of an object; what its own code raises is told with its name."""
    try:
        yield from kind.leaves()
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{kind.prefix}: its state cannot be had: {type(error).__name__}: {error}") from error


def predict_optimizer_tensors(objects: Mapping[str, object], *, rank: int) -> dict[str, torch.Tensor]:
    """Return what optimizers are going to hold after their first step, as far as their options tell.

    Parameters stand for state of their shape, so that the room it needs is known before training begins.
    """
    kinds = bind_kinds(objects, rank=rank)
    return {name: leaf for kind in kinds if isinstance(kind, OptimizerObject) for name, leaf in kind.coming()}


def of_optimizers(objects: Mapping[str, object], *, rank: int) -> frozenset[str]:
    """Return the names of the tensors that only an optimizer's step changes: its state, and its parameters.

    Nobody says so of others: a forward pass may change a buffer, and whatever trains them a parameter. Nor of an
    optimizer whose steps do not call torch's hooks first.
    """
    kinds = bind_kinds(objects, rank=rank)
    every = [kind for kind in kinds if isinstance(kind, OptimizerObject)]
    optimizers = [each for each in every if has_hooked_steps(each.optimizer)]
    trained = {id(param) for each in optimizers for param in each.params}
    trained -= {id(param) for each in every if each not in optimizers for param in each.params}
    found = {name for each in optimizers for name, leaf in each.leaves() if is_tensor(leaf)}
    for each in kinds:
        if isinstance(each, Modules):
            found |= {
                names.join_segments(each.prefix, name) for name, param in each.parameters() if id(param) in trained
            }
    return frozenset(found)


def bind_kinds(objects: Mapping[str, object], *, rank: int, step: int | None = None) -> list[ObjectKind]:
    """Each object as the kind it is, in the order in which a restore loads them.

    Modules come first, optimizers next. Loaders come after all other objects, since their workers get copies of what
    these hold; random generators come last, since loaders draw when they begin.
    """
    if RANK in objects:
        raise CheckpointError(f"an object cannot be called {RANK!r}: what is each rank's own is saved under this name")
    prefixes = {name: _make_prefix(name, each, rank) for name, each in objects.items()}
    modules = {name: Modules(prefixes[name], found) for name, each in objects.items() if (found := _list_modules(each))}
    known = {id(param): (each.prefix, name) for each in modules.values() for name, param in each.parameters()}
    optimizers: list[OptimizerObject] = []
    others: list[ObjectKind] = []
    for name, each in objects.items():
        inner = unwrap_marked(each)
        if name in modules:
            continue
        if isinstance(inner, torch.optim.Optimizer) and (is_zero_redundancy(inner) or has_usual_state(inner)):
            own = names.join_segments(RANK, str(rank), names.escape_segment(name))
            _refuse_foreign_parameters(name, inner)
            kind = ZeroRedundancyObject if is_zero_redundancy(inner) else OptimizerObject
            optimizers.append(kind(prefixes[name], inner, _name_parameters_apart(inner, known), own))
        elif isinstance(inner, Stateful):
            others.append(StatefulObject(prefixes[name], inner, step))
        elif _is_immutable(inner):
            raise CheckpointError(_tell_immutable(name, inner))
        elif why := explain_copied_state(name, inner):
            raise CheckpointError(why)
        else:
            others.append(StateValue(prefixes[name], inner))
    for optimizer in optimizers:
        if optimizer.has_places:
            # What is each rank's own is not what all ranks' optimizer has at a place.
            is_own = optimizer.prefix.startswith(f"{RANK}.")
            seen = [each for each in others if is_own or not each.prefix.startswith(f"{RANK}.")]
            leaves = (leaf for each in seen if isinstance(each, StateValue) for leaf in each.named_leaves())
            optimizer.hold(find_holders(leaves))
    return [*modules.values(), *optimizers, *sorted(others, key=_get_load_order)]


def _get_load_order(kind: ObjectKind) -> int:
    inner = kind.inner if isinstance(kind, StatefulObject) else None
    return 2 if isinstance(inner, Rng) else 1 if is_loader(inner) else 0


def _make_prefix(name: str, each: object, rank: int) -> str:
    own = names.escape_segment(name)
    return names.join_segments(RANK, str(rank), own) if isinstance(each, PerRank) else own


def _refuse_foreign_parameters(name: str, optimizer: torch.optim.Optimizer) -> None:
    found = [each for group in optimizer.param_groups for each in group["params"]]
    if foreign := [each for each in found if getattr(each, "is_trained_elsewhere", False)]:
        more = f" and {len(foreign) - 1} more" if len(foreign) > 1 else ""
        raise CheckpointError(
            f"{name}: the optimizer has {foreign[0]!r}{more}, which other processes of the pipeline train: make it of "
            "run.groups() or run.parameters(), not of the model's parameters"
        )


def _name_parameters_apart(optimizer: torch.optim.Optimizer, known: Mapping[int, tuple[str, str]]) -> dict[int, str]:
    """Return the names of an optimizer's parameters.

    They have their module's own where two modules have some of the same name.
    """
    own = {id(each) for group in optimizer.param_groups for each in group["params"]} & known.keys()
    owners: dict[str, set[str]] = {}
    for prefix, name in (known[each] for each in own):
        owners.setdefault(name, set()).add(prefix)
    alike = {prefix for prefixes in owners.values() if len(prefixes) > 1 for prefix in prefixes}
    return {
        each: names.join_segments(prefix, name) if prefix in alike else name
        for each in own
        for prefix, name in (known[each],)
    }


def _is_immutable(value: object) -> bool:
    if isinstance(value, tuple):
        return not value or any(map(_is_immutable, value))
    return value is None or isinstance(value, int | float | complex | str | bytes | frozenset | range)


def _tell_immutable(name: str, value: object) -> str:
    return (
        f"{name}: a {type(value).__name__} stays what it is now, and would be saved as that for ever; give a "
        f"dictionary that holds it and is kept up to date, as state={{{name!r}: …}}"
    )


def _list_modules(each: Any) -> Sequence[nn.Module]:
    inner = unwrap_marked(each)
    if isinstance(inner, nn.Module):
        return [inner]
    if isinstance(inner, list | tuple) and inner and all(isinstance(one, nn.Module) for one in inner):
        return inner
    return []
