"""Runs a model on tensors without data and writes down what it does.

`torch.export` finds the same edges, but as operations of ATen: which call of which module they were, and with which
arguments, it no longer knows, and it refuses the whole model for one block that depends on data. So this listens at the
level where modules and functions are called, and a call that cannot be followed is one opaque call.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping
from operator import is_
from typing import Any

import torch
from torch import nn
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.graph import increment_version
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from everstep.pipeline.frontend import opaque
from everstep.pipeline.frontend.attributes import AttributeReads
from everstep.pipeline.frontend.own_state import explain_hooks, explain_own_state
from everstep.pipeline.frontend.patches import listen_to_model
from everstep.pipeline.frontend.placement import built_in, get_current_stage
from everstep.pipeline.frontend.record import Call, ForwardRecord, GuessFailed, Op, SizesFixed, TensorInfo, Untraceable
from everstep.pipeline.frontend.refs import (
    Argument,
    Constant,
    Here,
    Ref,
    Size,
    Template,
    ValueRef,
    Weight,
    describe_odd_result,
    holds_more,
    iterate_references,
    make_template,
    register_dataclasses,
)
from everstep.pipeline.frontend.renames import Renames
from everstep.pipeline.frontend.sizes import Sizes
from everstep.pipeline.frontend.taken_sizes import restore_sizes, run_operation
from everstep.pipeline.frontend.writes import only_reads_statistics

HERE = Here()
_KINDS = ((torch.SymInt, int), (torch.SymFloat, float), (torch.SymBool, bool))
_DIFFERENTIATES = {torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad}
_T: Any = torch.Tensor  # its types do not tell that properties can be set
_REPLACES = {_T.data.__set__, _T.grad.__set__, _T.resize_, _T.set_}
# Not seen in the version of a tensor, but what comes after depends on it having been done here.
HOOKS = {torch.Tensor.register_hook, torch.Tensor.retain_grad, torch.Tensor.register_post_accumulate_grad_hook}
_MARKS = HOOKS | {torch.Tensor.requires_grad_, _T.requires_grad.__set__}
_BY_STRIDES = {torch.as_strided, torch.Tensor.as_strided}
_OF_MEMORY = _BY_STRIDES | {torch.Tensor.stride, torch.Tensor.storage_offset, torch.Tensor.is_contiguous}
_STATISTICS = {nn.functional.batch_norm, torch.batch_norm, nn.functional.instance_norm, torch.instance_norm}


class CannotFollow(Exception):
    """The call that is under way is opaque; the message says why."""


class Recorder(TorchFunctionMode):  # type: ignore[misc]  # torch is not where types are checked
    """A recorder of one forward of `model`.

    Args:
        model: The model to record.
        sizes: The symbols that stand for sizes.
        device: The device of the example.
        unseen: The modules that are known to be opaque, by path, with the reason.
        unsplit_inputs: The arguments without samples.
        sure: The modules within which sizes that depend on data are taken for those of arguments, by path.
    """

    def __init__(
        self,
        model: nn.Module,
        sizes: Sizes,
        device: torch.device,
        unseen: Mapping[str, str],
        unsplit_inputs: Collection[str] = (),
        sure: Collection[str] = (),
    ) -> None:
        super().__init__()
        self.unsplit_inputs, self.sure, self._guesses = unsplit_inputs, sure, sizes.guesses
        self.fake = FakeTensorMode(shape_env=sizes.env, allow_non_fake_inputs=True)
        self.sizes, self.device, self.unseen = sizes, device, unseen
        self.autocasts: list[tuple[str, Any, bool]] = []
        self.busy = self.seeded = self.drawn = False
        self._paths = {id(module): name for name, module in model.named_modules()}
        self._own_parameters = {id(module): tuple(module._parameters.values()) for module in model.modules()}
        self.attributes = AttributeReads(model, lambda: self.busy)
        self._repeats: dict[str, int] = {}
        self._stack: list[Call] = []
        self._clock = 0
        self._refs: dict[int, Ref] = {}
        self._renames = Renames(self._refs)
        self._keep: list[Any] = []  # so that no two tensors have the same id
        self._made: list[Any] = []  # the tensor of each value
        self._stand_ins: dict[Ref, Any] = {}
        self.record = ForwardRecord(Call("", 0, model, 0, model.training), sizes, device)
        self.record.weights = dict(model.named_parameters())
        self.record.weights |= {name: each for name, each in model.named_buffers() if name not in self.record.weights}
        self._refs.update({id(weight): Weight(name) for name, weight in self.record.weights.items()})
        named = [(name, each) for name, each in model.named_parameters() if each.layout is torch.strided]
        self._memory = {_get_storage_key(each): name for name, each in named}

    def run(self, model: nn.Module, arguments: Mapping[str, Any], call: Any) -> ForwardRecord:
        """`call(arguments)` runs the model; Untraceable if nothing can be said of it."""
        # Without the dispatcher, operations such as constant padding read sizes as numbers, which fixes them.
        with self.fake, enable_python_dispatcher():
            given = {name: self._arguments(name, value, ()) for name, value in arguments.items()}
            held = self.attributes.held_objects
            with held.kept():
                self.attributes.watch_arguments(given, self._stack)
                with torch.enable_grad(), listen_to_model(self), held.listening(), self:
                    call(given)
                self.attributes.settle()
        read, record = self.attributes, self.record
        record.reads, record.left, record.given_reads = read.found, read.left, read.given
        record.modes, record.modes_after, record.set_modes = read.modes, read.modes_after, read.set_modes
        record.values, record.unchanged = [*map(self._describe, self._made)], self._renames.find_unchanged()
        self.record.made = self.sizes.find_made_places(self._made)
        for found in self.record.arguments.values():
            for path, tensor in found.items():
                found[path] = self._describe(tensor)
        return self.record

    # ---- what the model does ----

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.busy:
            return func(*args, **kwargs)
        return self._operation(_name_operation(func), func, args, kwargs)

    def function(self, cls: Any, apply: Any, args: Any, kwargs: Any) -> Any:
        """A custom autograd function, which is never looked into."""
        self.busy = True
        if any(isinstance(arg, nn.Module) or callable(arg) for arg in args if not isinstance(arg, torch.Tensor)):
            self.busy = False
            raise CannotFollow(f"{cls.__name__} runs code that it is given, which a trace cannot record")
        self.busy = False
        return self._operation(cls.__name__, apply, args, kwargs)

    def attribute(self, module: nn.Module, name: str, value: Any) -> None:
        """An attribute of a module that its code, or another module's, reads."""
        if self._stack:
            self.attributes.note(module, name, value, self._stack)

    def absence(self, module: nn.Module, name: str) -> None:
        """An attribute that is not there."""
        if self._stack:
            self.attributes.note_absence(module, name, self._stack)

    def takes_keys(self) -> bool:
        """Tell whether a size may be a key, and so a number: in the model's own code, which must be recorded. A module
        inside with such code runs as it is, with any size."""
        return not self.busy and len(self._stack) == 1

    def call(self, original: Any, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """A call of a module, whose operations are recorded inside."""
        path = self._paths.get(id(module))
        if path is None:
            return original(module, *args, **kwargs)
        call = self._begin(module, path, args, kwargs)
        buffers, parameters, renamed = dict(module._buffers), dict(module._parameters), len(self._renames)
        versions, guesses = self._list_versions(args, kwargs), len(self.sizes.guessed)
        fixed = self.sizes.count_fixed()
        try:
            if path in self.unseen:
                raise CannotFollow(self.unseen[path])
            result = original(module, *args, **kwargs)
            self._assume()
            if replaced := [name for name, held in module._buffers.items() if self._is_other(held, buffers.get(name))]:
                call.whole = call.whole or f"its code puts another tensor in the place of its buffer {replaced[0]}"
                self.record.replaced.update(f"{path}.{name}" for name in replaced if buffers.get(name) is not None)
            if others := [name for name, held in parameters.items() if module._parameters.get(name) is not held]:
                call.whole = call.whole or f"its code puts another tensor in the place of its parameter {others[0]}"
                self.record.replaced.update(f"{path}.{name}" if path else name for name in others)
        except Exception as error:
            if len(self._stack) == 1:
                raise Untraceable(self._why(error)) from error
            self._assume()
            if self.sizes.are_fixed_by(each for part in call.all_calls() for each in part.conditions):
                raise SizesFixed(path, self._why(error)) from error
            if len(self.sizes.guessed) > guesses and not isinstance(error, CannotFollow):
                raise GuessFailed(path) from error
            self.busy = True
            self._renames.undo(renamed)
            try:
                result = self._unseen(call, module, args, kwargs, error)
            finally:
                self.busy = False
        finally:
            self._stack.pop()
        call.fixes = self.sizes.count_fixed() > fixed
        now = self._list_versions(args, kwargs)
        self.busy = True
        call.changes |= {place for place, version in enumerate(versions) if now[place : place + 1] != [version]}
        call.outputs = self._handed(result)
        if call.outputs is None and call is self.record.root:
            self.record.odd = describe_odd_result(result)
        if call.outputs is not None:
            self._renames.leave(renamed, set(iterate_references(call.outputs)))
        self.busy = False
        return result

    def _begin(self, module: nn.Module, path: str, args: Any, kwargs: Any) -> Call:
        self._assume()
        self.busy = True
        self._clock += 1
        if self._stack:
            repeat = self._repeats.get(path, 0)
            self._repeats[path] = repeat + 1
            call = Call(path, repeat, module, self._clock, module.training, self._stack[-1])
            self._stack[-1].body.append(call)
        else:
            call = self.record.root
        own = explain_own_state(module) if self._stack else ""
        call.whole, call.is_lent = explain_hooks(module) or own, any(map(self._is_lent, module.modules()))
        call.grad, call.autocast = torch.is_grad_enabled(), self.autocasts[-1] if self.autocasts else None
        call.stage = built_in(module) if (here := get_current_stage()) is None else here
        call.inputs = self._handed((args, kwargs))
        self._stack.append(call)
        self.busy = False
        return call

    def _operation(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        self._assume()
        self.busy = True
        try:
            if func in _DIFFERENTIATES:
                raise CannotFollow(
                    f"{name} is called in forward: a gradient of a gradient does not pass from stage to stage"
                )
            if func in _REPLACES:
                raise CannotFollow(f"{name} replaces the memory of a tensor")
            inputs = make_template((args, kwargs), self._refer)
            self.seeded = self.drawn = False
            given, here = pytree.tree_map(self._stand_in, (args, kwargs)), self._stack[-1]
            tensors = [leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, torch.Tensor)]
            before = [tensor._version for tensor in tensors]
            if func in _OF_MEMORY and (name_of := self.record.given.get(_get_storage_key(tensors[0]))) is not None:
                self.record.laid_out.add(name_of)
            result = run_operation(self.sizes, name, func, given, here.path)
            # What torch itself assumed, it checks whenever it runs, or `assumed_sizes` does.
            if self.sizes.new_conditions(name, tensors) and self.sizes.batch_is_fixed():
                raise SizesFixed(here.path)
            result = restore_sizes(self.sizes, func, given, result, here.path)
            mutated = [tensor for tensor, version in zip(tensors, before, strict=True) if tensor._version != version]
            # By strides: so that who made it, and knows how it lies in memory, is in the same stage.
            if func in _MARKS or (func in _BY_STRIDES and _get_storage_key(tensors[0]) not in self.record.lasting):
                mutated.append(tensors[0])
            if func in _STATISTICS and not only_reads_statistics(here, args, kwargs):
                mutated += [tensor for tensor in tensors[1:3] if not isinstance(tensor, nn.Parameter)]
            made = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
            if made or mutated:
                self._note(name, func, inputs, result, tensors, made, mutated)
            return result
        finally:
            self.sizes.release(as_numbers=True)
            self.busy = False

    def _note(
        self, name: str, func: Any, inputs: Template, result: Any, given: list[Any], made: list[Any], mutated: list[Any]
    ) -> None:
        self._clock += 1
        owner, changed = self._stack[-1], frozenset(map(_get_storage_key, mutated))
        # What an operation gives is a new value even where it is the tensor that it was given: whoever uses it then
        # depends on what was done in place, and dropout is the same in evaluation as in training.
        for tensor in {id(tensor): tensor for tensor in made}.values():
            if not isinstance(tensor, FakeTensor):
                raise CannotFollow(f"{name} made a tensor that holds data")
            self._register(tensor, is_changed=_get_storage_key(tensor) in changed)
        op = Op(name, func, self._clock, owner, inputs, make_template(result, self._refer))
        op.seeded, op.draws = self.seeded, self.drawn
        op.touches = frozenset(map(_get_storage_key, given + made))
        op.mutates = changed
        op.grad = torch.is_grad_enabled()
        op.autocast = self.autocasts[-1] if self.autocasts else None
        op.stage = get_current_stage()
        owner.body.append(op)

    # ---- what cannot be followed ----

    def _unseen(self, call: Call, module: nn.Module, args: Any, kwargs: Any, error: Exception) -> Any:
        reason = self._why(error)
        if call.inputs is None:
            raise CannotFollow(reason) from error
        try:
            stand_ins = pytree.tree_map(self._stand_in, (args, kwargs))
            self.sizes.guesses = self._guesses and not any(f"{call.path}.".startswith(f"{each}.") for each in self.sure)
            found = opaque.infer_outputs(module, stand_ins, self.sizes, self.fake, self.device)
            result, mutated, written, call.varies = found
        except opaque.Failed as failed:
            raise CannotFollow(f"{reason}; and {failed}") from error
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._register(leaf, is_changed=True)
        call.body, call.conditions, call.opaque, call.whole = [], [], reason, reason
        held = [*module.parameters(), *module.buffers()]
        call.weights = tuple(ref.name for ref in (self._refer(each) for each in held) if isinstance(ref, Weight))
        given = [leaf for leaf in pytree.tree_leaves(stand_ins) if isinstance(leaf, torch.Tensor)]
        call.writes, call.changes = tuple(written), frozenset(mutated)
        changed = [each for name, each in module.named_parameters() if name in written]
        buffers = [self._stand_in(each) for each in (*module.buffers(), *changed)]  # any buffer may be written
        call.mutates = frozenset(_get_storage_key(given[index]) for index in mutated) | frozenset(
            map(_get_storage_key, buffers)
        )
        increment_version([given[index] for index in mutated])
        made = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        call.touches = frozenset(map(_get_storage_key, given + buffers + made))
        if self.sizes.new_conditions() and self.sizes.batch_is_fixed():
            raise SizesFixed(call.path)
        return result

    def _why(self, error: Exception) -> str:
        if isinstance(error, CannotFollow | Untraceable):
            return str(error)
        where, why = self._stack[-1].path if self._stack else "", str(error).strip().partition("\n")[0][:200]
        advice = "" if where else ": put what depends on data into a module of its own, which is then in one stage"
        return f"{where or 'the model'} cannot be run without data ({type(error).__name__}: {why}){advice}"

    def _assume(self) -> None:
        """Conditions on sizes that came up since the last operation are those of the module's own code."""
        if not self._stack or self.busy:
            return
        self.sizes.refuse_long()
        found = self.sizes.new_conditions()
        if found and self.sizes.batch_is_fixed():
            raise SizesFixed(self._stack[-1].path)
        self._stack[-1].conditions += found

    def _list_versions(self, args: Any, kwargs: Any) -> list[int]:
        """Return the versions of the tensors that a call is given."""
        self.busy = True
        tensors = (leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
        refs = ((self._refs.get(id(tensor)), tensor) for tensor in tensors)
        found = [(tensor if ref is None else self._stand_ins.get(ref, tensor))._version for ref, tensor in refs]
        self.busy = False
        return found

    def _is_lent(self, module: nn.Module) -> bool:
        """Tell whether a module has parameters of others in the place of its own for this call."""
        own = self._own_parameters.get(id(module))
        return own is not None and not all(map(is_, module._parameters.values(), own))

    def _is_other(self, held: Any, before: Any) -> bool:
        """Tell whether another tensor is in the place of a buffer, and not the same one changed in place."""
        if held is before or held is None:
            return held is not before
        ref = self._refs.get(id(before))
        return ref is None or held is not self._stand_ins.get(ref)

    # ---- tensors ----

    def _register(self, tensor: Any, *, is_changed: bool) -> None:
        self._renames.add(id(tensor), ValueRef(len(self._made)), is_changed=is_changed)
        self._made.append(tensor)

    def _refer(self, leaf: Any) -> Any:
        """Return the reference that stands for a leaf in a template; raise CannotFollow for a tensor of unknown
        origin."""
        if isinstance(leaf, torch.Tensor):
            if id(leaf) not in self._refs:
                if isinstance(leaf, FakeTensor):
                    raise CannotFollow("a tensor comes from code that the trace cannot record")
                self._refs[id(leaf)] = Constant(len(self.record.constants))
                if leaf.layout is torch.strided and (name := self._memory.get(_get_storage_key(leaf))) is not None:
                    self.record.aliases[len(self.record.constants)] = name
                self.record.constants.append(leaf)
                self._keep.append(leaf)
            return self._refs[id(leaf)]
        for symbolic, kind in _KINDS:
            if isinstance(leaf, symbolic):
                known = leaf.node.maybe_as_int() if kind is int else None
                return known if known is not None else Size(leaf.node.expr, kind)
        if isinstance(leaf, torch.device):
            same = leaf.type == self.device.type and leaf.index in (None, self.device.index)
            return HERE if same else leaf
        return leaf

    def _handed(self, structure: Any) -> Template:
        """Return the template of what a module was given or gave; None if there is something in it that cannot be made
        again."""
        try:
            found = make_template(register_dataclasses(structure), self._refer)
        except CannotFollow:
            return None
        return None if any(map(holds_more, pytree.tree_leaves(structure))) else found

    def _stand_in(self, leaf: Any) -> Any:
        """Return a tensor without data for one with data."""
        if not isinstance(leaf, torch.Tensor) or isinstance(leaf, FakeTensor):
            return leaf
        ref = self._refs[id(leaf)] if id(leaf) in self._refs else self._refer(leaf)
        if ref not in self._stand_ins:
            if type(leaf) not in (torch.Tensor, nn.Parameter):
                raise CannotFollow(f"{ref} is a {type(leaf).__name__}, not a plain tensor")
            device = self.device if leaf.device.type == "meta" else leaf.device
            with torch.no_grad():
                made = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=device)
            if isinstance(leaf, nn.Parameter):
                made = nn.Parameter(made, requires_grad=leaf.requires_grad)
            self._stand_ins[ref] = made
            self._refs[id(made)] = ref
            self.record.lasting.add(_get_storage_key(made))
            if isinstance(ref, Weight):
                self.record.held[_get_storage_key(made)] = ref.name
        return self._stand_ins[ref]

    def _arguments(self, name: str, value: Any, path: tuple[Any, ...]) -> Any:
        """The example's argument without its data, with sizes that may change."""
        if isinstance(value, dict):
            found = {key: self._arguments(name, each, (*path, key)) for key, each in value.items()}
            return OrderedDict(found) if isinstance(value, OrderedDict) else found
        if isinstance(value, list | tuple):
            items = [self._arguments(name, each, (*path, at)) for at, each in enumerate(value)]
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        if not isinstance(value, torch.Tensor):
            return value
        first = [self.sizes.batch_size] if value.dim() and name not in self.unsplit_inputs else []
        sizes = [self.sizes.symbol(size) for size in value.shape[len(first) :]]
        for dim, size in enumerate(sizes, len(first)):
            self.record.symbols[size.node.expr] = name, path, dim
        sizes = list(map(int, sizes)) if self.sizes.are_numbers else sizes
        made: Any = torch.empty(first + sizes, dtype=value.dtype, device=self.device)
        self._refs[id(made)] = Argument(name, path)
        self._keep.append(made)
        self.record.lasting.add(_get_storage_key(made))
        self.record.given[_get_storage_key(made)] = name
        self.record.arguments.setdefault(name, {})[path] = made  # described when all is known
        return made

    def _describe(self, tensor: Any) -> TensorInfo:
        return TensorInfo(self.sizes.shape(tensor), tensor.dtype, bool(tensor.requires_grad))


def _get_storage_key(tensor: Any) -> int:
    return int(tensor.untyped_storage()._cdata)


def _name_operation(func: Any) -> str:
    name = getattr(func, "__name__", type(func).__name__)
    name = getattr(func.__self__, "__name__", name) if name in ("__get__", "__set__") else name
    return name.strip("_") + "_" * (not name.startswith("_") and name.endswith("_"))
