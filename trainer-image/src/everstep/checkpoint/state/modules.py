"""Save modules: parameters, buffers and extra state by their fully qualified names, whatever wraps the module.

The names are those of `torch.distributed.checkpoint.state_dict`, so that plain, DDP, FSDP2 and compiled modules fit
each other; not through it, because its checks cost a save milliseconds for each thousand parameters.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from everstep.checkpoint.errors import CheckpointError
from everstep.checkpoint.format.descriptions import is_description
from everstep.checkpoint.state import names
from everstep.checkpoint.state.aliases import find_aliases
from everstep.checkpoint.state.bulk import is_leaf
from everstep.checkpoint.state.kinds import (
    Absent,
    Saved,
    describe_misfit,
    filled_later,
    have_other_bytes,
    is_tensor,
    make_fresh_tensor,
)
from everstep.checkpoint.state.loaded import is_instance
from everstep.checkpoint.state.memory import (
    fill_overlapping,
    get_local_tensor,
    have_same_bits,
    overlaps_itself,
    why_not_saved,
)
from everstep.checkpoint.state.module_metadata import (
    find_own_loading,
    find_unusual,
    read_unusual,
    set_metadata_as_here,
)
from everstep.checkpoint.state.nesting import check_nesting
from everstep.checkpoint.state.structure import KIND, describe_module, describe_state
from everstep.checkpoint.state.ties import describe_ties

_FSDP1 = ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel")
_FSDP2 = ("torch.distributed.fsdp", "FSDPModule")
_EXTRA_STATE = "_extra_state"
_ACTIVATIONS = ("torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "ActivationWrapper")


class Modules:
    """One module, or several whose names do not overlap (the stages of a pipeline that this rank holds)."""

    exclusive = True

    def __init__(self, prefix: str, modules: Sequence[nn.Module]) -> None:
        self.prefix = prefix
        self._modules = modules
        for module in modules:
            for each in module.modules():
                if is_instance(each, *_FSDP1):
                    raise CheckpointError(
                        f"{prefix}: FullyShardedDataParallel is not supported; use fully_shard (FSDP2)"
                    )
                if is_instance(each, *_FSDP2):
                    # After a forward pass alone its parameters are whole, and others than those of the optimizer.
                    each.reshard()  # type: ignore[operator,unused-ignore]

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the names below the prefix and parameters; one that is tied has its first name."""
        for module in self._modules:
            plain = make_unwrapping(module)
            for name, parameter in module.named_parameters():
                yield names.of_module(plain(name)), parameter

    def leaves(self) -> Iterator[tuple[str, Any]]:
        states = [(make_unwrapping(module), module.state_dict()) for module in self._modules]
        unusual: dict[str, dict[str, Any]] | None = {}
        for plain, state in states:
            said = read_unusual(state)
            if said is None or unusual is None:
                unusual = None
            else:
                unusual |= {names.of_module(plain(path)): each for path, each in said.items()}
        if unusual and len(states) > 1:
            unusual.pop("", None)  # of each stage of a pipeline, which nobody else has
        yield from ((names.join_segments(self.prefix, name), each) for name, each in describe_module(unusual))
        leaves = [leaf for plain, state in states for leaf in self._leaves_of(plain, state)]
        yield from leaves
        # What a module's extra state shares is said in its own description.
        own = {name: each for name, each in leaves if is_tensor(each) and _EXTRA_STATE not in name.split(".")}
        tied = find_aliases(own).groups
        yield from describe_ties([name for (name,) in group] for group in tied)

    def _leaves_of(self, plain: Callable[[str], str], state: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        for key, value in state.items():
            full = names.join_segments(self.prefix, names.of_module(plain(key)))
            if is_tensor(value):
                yield full, value
            else:
                check_nesting(value, full)
                yield from names.walk_leaves(value, is_leaf, full)
                if described := describe_state(value, is_leaf):
                    yield names.join_segments(full, KIND), described

    def broadcast_from_others(self) -> Iterator[str]:
        """Yield the full names of the buffers that the next forward pass of a DDP gets from another rank.

        They are overwritten, whatever is here.
        """
        for module in self._modules:
            wrapped = [(path, each) for path, each in module.named_modules() if isinstance(each, DDP)]
            if not wrapped:
                continue
            plain = make_unwrapping(module)
            received = {
                f"{path}.{name}" if path else name: buffer
                for path, each in wrapped
                for name, buffer in _received_buffers(each)
            }
            for key in _list_keys(module, received):
                yield names.join_segments(self.prefix, names.of_module(plain(key)))

    def targets(self, saved: Saved, problems: list[str]) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        first: dict[tuple[object, ...], str] = {}  # the name by which a tensor with several was met first
        for module in self._modules:
            plain = make_unwrapping(module)
            # The outermost module has no name, and of_module() takes "" for a key.
            resizing = {names.of_module(here) if (here := plain(path)) else "" for path in find_own_loading(module)}
            tied = _list_tied(module, plain)
            for key, value in module.state_dict().items():
                name = _find_saved_name(saved, plain(key))
                full = saved.full(name)
                owner, _, last = names.of_module(plain(key)).rpartition(".")
                if not is_tensor(value) or (last == _EXTRA_STATE and name in saved.tensors):
                    found.update(
                        {
                            saved.full(each): make_fresh_tensor(tensor)
                            for each, tensor in _list_subtree(saved.tensors, name)
                        }
                    )
                elif name not in saved.tensors:
                    # As transformers and safetensors write a tied tensor: under one of its names.
                    if saved.tensors.keys().isdisjoint(tied.get(name, ())):
                        problems.append(Absent.of_name(full))
                elif owner in resizing and saved.tensors[name].shape != tuple(value.shape):
                    found[full] = make_fresh_tensor(
                        saved.tensors[name]
                    )  # as lazily made buffers: the module takes any size
                elif why := describe_misfit(saved.tensors[name], value, saved.casts):
                    problems.append(f"{full} {why}")
                elif (known := first.setdefault(_get_memory_identity(value), name)) != name and have_other_bytes(
                    saved, known, name
                ):
                    problems.append(
                        f"{saved.full(known)} and {full} are one tensor here (tied) and have different values in the "
                        "checkpoint: untie them before restore(), or tie them in the model that saves"
                    )
                else:
                    found[full] = filled_later(value)
        return found

    def load(self, saved: Saved, tensors: Mapping[str, torch.Tensor]) -> None:
        unusual = find_unusual({name: saved.value(name) for name in saved.values if is_description(name)})
        for module in self._modules:
            plain, here = make_unwrapping(module), module.state_dict()
            # One that is not saved, as a sparse buffer that is not persistent, may have no address.
            held = (*module.parameters(), *module.buffers())
            own = {_get_address(each) for each in held if why_not_saved(each) is None}
            # What changes a state on its way gets all of it; everything is in place already for all others.
            is_changed = bool(find_own_loading(module))
            given: OrderedDict[str, Any] = OrderedDict()
            for key, value in here.items():
                name = _find_saved_name(saved, plain(key))
                filled = tensors.get(saved.full(name))
                if not is_tensor(value):
                    extra = saved.below(name)
                    if extra:
                        given[key] = extra.nested(tensors)
                elif filled is None:
                    continue
                elif overlaps_itself(value):
                    fill_overlapping(value, filled, saved.full(name))
                elif is_changed or _get_address(value) not in own or _get_address(filled) != _get_address(value):
                    # A hook made this tensor, or took it apart: the module itself knows how to take it back.
                    given[key] = filled.detach()
            set_metadata_as_here(given, here, unusual, plain)
            left = {key: given[key] for key in _load_state(module, given) if is_tensor(given.get(key))}
            _check_is_here(module, left, self.prefix)


def _find_saved_name(saved: Saved, key: str) -> str:
    """Return the name under which a checkpoint has what a module's state has by this key.

    A dictionary of a module's tensors, as of averaged weights, may be renamed to a module: each of its keys is one
    piece of a name there, whatever dots are in it.
    """
    path, piece = names.of_module(key), names.escape_segment(key)
    return piece if piece in saved.tensors and path not in saved.tensors else path


def _load_state(module: nn.Module, state: Mapping[str, Any]) -> list[str]:
    """Give a module a state; what is not in it stays as it is, where the module's own method knows that way.

    Returns:
        The names that the module did not take.
    """
    takes = inspect.signature(module.load_state_dict).parameters
    if "strict" not in takes and not any(each.kind is each.VAR_KEYWORD for each in takes.values()):
        module.load_state_dict(state)
        return []
    result = module.load_state_dict(state, strict=False)
    return list(getattr(result, "unexpected_keys", ()))


def _check_is_here(module: nn.Module, state: Mapping[str, torch.Tensor], prefix: str) -> None:
    """See that a module has these tensors, of which its `state_dict()` speaks and which `load_state_dict()` left out.

    Some, as the weights of 4 bits of bitsandbytes, say there what they keep beside parameters and buffers. What lies
    in memory of their own is filled by now; what was made for the state alone has to be the same already.

    Raises:
        CheckpointError: It has others.
    """
    here = module.state_dict() if state else {}
    for key, tensor in state.items():
        now = get_local_tensor(here[key])
        if not have_same_bits(now, get_local_tensor(tensor).to(now.device)):
            raise CheckpointError(
                f"{names.join_segments(prefix, names.of_module(key))} is made by the module's state_dict(), and its "
                "load_state_dict() does not take it back: the module has another one than the checkpoint. Make the "
                "module as it was when it was saved, or give it a load_state_dict() that takes it"
            )


def _list_tied(module: nn.Module, plain: Callable[[str], str]) -> dict[str, list[str]]:
    """Return all names of each parameter and buffer that has several, by each of them."""
    holders: dict[int, list[str]] = {}
    for listed in (module.named_parameters, module.named_buffers):
        for name, each in listed(remove_duplicate=False):
            holders.setdefault(id(each), []).append(names.of_module(plain(name)))
    return {name: every for every in holders.values() if len(every) > 1 for name in every}


def _list_keys(module: nn.Module, buffers: Mapping[str, torch.Tensor]) -> Iterable[str]:
    """Return what the `state_dict()` of a module calls these buffers, and their names in it.

    Args:
        module: Any module.
        buffers: Of it, by their names in it.
    """
    if all(getattr(each.state_dict, "__func__", None) is nn.Module.state_dict for each in module.modules()):
        return buffers
    # One of its own may be that of a module within, as that of what Lightning Fabric's setup() returns.
    held = {_get_memory_identity(each) for each in buffers.values()}
    own = [key for key, each in module.state_dict().items() if is_tensor(each) and _get_memory_identity(each) in held]
    return {*buffers, *own}  # it may say a copy of what has the same name


def _received_buffers(ddp: DDP) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield names and buffers that this rank gets from another one before the next forward pass."""
    # A hook may do anything else with them, as take their mean: then none of them is the truth.
    ignores = getattr(ddp, "_use_python_reducer", False) or getattr(ddp, "_delay_all_reduce_all_params", False)
    if not ddp.broadcast_buffers or hasattr(ddp, "buffer_hook") or ignores:
        return
    group = ddp.process_group
    # Within join() ranks may have no more data: DDP takes the last rank, which all of them agree on.
    source = dist.get_world_size(group) - 1 if ddp._join_config.enable else 0
    if dist.get_rank(group) == source:
        return
    sent = {id(each) for name, each in ddp.module.named_buffers() if name not in ddp.parameters_to_ignore}
    for name, each in ddp.named_buffers(remove_duplicate=False):
        if id(each) in sent:
            yield name, each


def make_unwrapping(module: nn.Module) -> Callable[[str], str]:
    """Return a function that gives a name within the module as it is when nothing wraps it or any module inside."""
    inner = {name: attribute for name, each in module.named_modules() if (attribute := _find_wrapped_attribute(each))}
    if not inner:
        return lambda name: name

    def plain(name: str) -> str:
        kept: list[str] = []
        path = ""
        for piece in name.split("."):
            # Some wrappers take themselves off the names in a state_dict, but not off those of parameters.
            while (attribute := inner.get(path)) not in (None, piece):
                path = f"{path}.{attribute}" if path else str(attribute)
            if attribute is None:
                kept.append(piece)
            path = f"{path}.{piece}" if path else piece
        return ".".join(kept)

    return plain


def _find_wrapped_attribute(module: nn.Module) -> str | None:
    """Return the attribute under which a wrapper holds what it wraps."""
    if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
        return "module"
    if is_instance(module, "torch._dynamo.eval_frame", "OptimizedModule"):
        return "_orig_mod"
    if is_instance(module, *_ACTIVATIONS):
        return "_checkpoint_wrapped_module"
    return None


def _list_subtree(tensors: Mapping[str, Any], name: str) -> list[tuple[str, Any]]:
    return [(each, tensor) for each, tensor in tensors.items() if each == name or each.startswith(f"{name}.")]


def _get_address(tensor: torch.Tensor) -> tuple[int, int]:
    here = get_local_tensor(tensor)
    # Tensors without elements share the address 0: there is nothing to copy in any of them.
    return here.data_ptr(), here.numel()


def _get_memory_identity(tensor: torch.Tensor) -> tuple[object, ...]:
    """Equal for two tensors that are the same elements in the same order; where there is none, for no two."""
    here = get_local_tensor(tensor)
    if not here.numel():
        return (id(tensor),)
    bits = (here.is_conj(), here.is_neg())
    return here.device, here.data_ptr(), here.dtype, tuple(here.shape), here.stride(), bits
