"""Finds the edges of an ordinary module: which call of which module uses what others made."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from everstep.pipeline.frontend import modes
from everstep.pipeline.frontend.arguments import Arguments
from everstep.pipeline.frontend.assumed_sizes import find_assumptions, forget_single_samples
from everstep.pipeline.frontend.attributes import AttributeRead, Key, Reader, changes_itself
from everstep.pipeline.frontend.autocast import casting_to
from everstep.pipeline.frontend.compiled import disable_compilation
from everstep.pipeline.frontend.counters import RecordWith, find_threshold
from everstep.pipeline.frontend.fixed_sizes import FixedSizes, are_free, find_fixed_sizes, group_places, with_sizes
from everstep.pipeline.frontend.kept_tables import KeptTables
from everstep.pipeline.frontend.record import Call, ForwardRecord, GuessFailed, SizesFixed, Untraceable
from everstep.pipeline.frontend.recorder import Recorder
from everstep.pipeline.frontend.result_kinds import find_used_symbols
from everstep.pipeline.frontend.script_draws import ScriptDraws
from everstep.pipeline.frontend.sizes import Sizes, SizesNotFollowed, collect_sizes, evaluate_size, symbols_of
from everstep.pipeline.frontend.units import Item, Units, find_units
from everstep.pipeline.graph import Graph, GraphNode


@dataclass(frozen=True, eq=False)
class Traced:
    """A model and its edges. `leaves`: of each node that is never cut although there is more inside, why.

    `both`: whether it holds for training and evaluation; else only for the mode that the model was in. `samples`: of
    the example; the bytes in `graph` are those of a micro-batch of that size, its times are 0 until somebody measures.
    `attributes`: those of modules that code reads which a cut may open, with their values, which are part of the trace;
    so are `sizes` of the arguments that its code takes for numbers. `opened`: the modules that a cut may open. `left`:
    the attributes that a forward leaves with something else in them. `asked`: the arguments of which no stage needs the
    numbers, but without which the code does something else. `modes`: by the paths of two modules, what the training
    flag of the second was for each one of the first, whose code reads it. `set_modes`: by the model's own, those set.
    """

    model: nn.Module
    record: ForwardRecord
    units: Units
    leaves: Mapping[str, str]
    both: bool
    samples: int
    attributes: Mapping[Key, Any] = field(default_factory=dict)
    opened: Collection[str] = ()
    sizes: FixedSizes = field(default_factory=FixedSizes)
    left: Collection[Key] = ()
    asked: Collection[str] = ()
    modes: Mapping[Reader, Mapping[bool, bool]] = field(default_factory=dict)
    set_modes: Mapping[bool, Mapping[str, bool]] = field(default_factory=dict)
    given: Mapping[str, Any] = field(default_factory=dict)  # what code reads of objects among the arguments

    @cached_property
    def graph(self) -> Graph:
        return _build_graph(self.record, self.units, self.samples)

    @property
    def varying(self) -> frozenset[str]:
        """Return the names of the values whose shapes may depend on data, and not on those of the arguments alone."""
        found = self.record.find_varying()
        return frozenset(name for unit in self.units.all for name, index in unit.values.items() if index in found)

    @cached_property
    def used_symbols(self) -> frozenset[Any]:
        """Return the sizes by which code goes, or with which it computes, that a cut may open."""
        return find_used_symbols(self.record, self.opened)

    @cached_property
    def manual(self) -> dict[str, int]:
        """The nodes that `with pipeline.stage(i)` has placed."""
        found = {}
        for unit in self.units.all:
            wanted = _get_wanted_stage(unit.item)
            if wanted is not None:
                found[unit.name] = wanted
        return found


_log = logging.getLogger("everstep.pipeline")
_CONTAINERS = (dict, OrderedDict, defaultdict, Counter, list, set, deque)  # hooks are in ordered ones


def trace_model(
    model: nn.Module, example: Any, unsplit_inputs: Collection[str] = (), *, autocast: torch.dtype | None = None
) -> Traced:
    """Trace a model by running it without data. Nothing of the model changes, and it may be on the meta device.

    Args:
        model: The model to trace.
        example: A batch: a tensor, a tuple of positional arguments, or a dictionary of arguments by name. Its tensors
            have the samples as their first dimension, but for those of `unsplit_inputs`. Sizes may differ later.
        unsplit_inputs: The arguments without samples.
        autocast: The type to which steps cast, since what the code reads of types is a part of the trace.

    Raises:
        Untraceable: Nothing can be said of the model's edges; `build_tree` may still cut it.
        PipelineError: The model does something else each time, by a plain attribute that it changes.
    """
    try:
        return _trace(model, example, unsplit_inputs, autocast, are_numbers=False)
    except SizesNotFollowed:
        _log.info("the sizes of this model are not followed: all batches must have the example's, but for samples")
        return _trace(model, example, unsplit_inputs, autocast, are_numbers=True)


def _trace(
    model: nn.Module,
    example: Any,
    unsplit_inputs: Collection[str],
    autocast: torch.dtype | None,
    *,
    are_numbers: bool,
) -> Traced:
    signature = Arguments(model)
    arguments, call = signature.name(example), partial(signature.call, model)
    tensors = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]
    cut = {name: value for name, value in arguments.items() if name not in unsplit_inputs}
    samples = {len(leaf) for leaf in pytree.tree_leaves(cut) if isinstance(leaf, torch.Tensor) and leaf.dim()}
    if len(samples) != 1:
        raise Untraceable(
            "the example's tensors must have the samples as their first dimension, but those are of "
            f"sizes {sorted(samples)}: name arguments that have no samples in EngineOptions.unsplit_inputs"
            if samples
            else "the example has no tensor with samples"
        )
    device = next((tensor.device for tensor in tensors if tensor.device.type != "meta"), torch.device("cpu"))
    known = collect_sizes([*tensors, *model.parameters(), *model.buffers()])
    flags, tables = {module: module.training for module in model.modules()}, KeptTables(model)
    is_mixed, is_alike = len({*flags.values()}) > 1, False

    def record_as(
        mode: bool,
        given: Mapping[str, Any] = arguments,
        made_hints: Mapping[int, int] | None = None,
        unseen: Mapping[str, str] = MappingProxyType({}),
        samples: int | None = None,
    ) -> ForwardRecord:
        """Record the model as it is, or in the other mode: each module in the one that it is not in, as what is frozen
        now may train later, or `is_alike`, all of them."""
        if mode != flags[model]:
            # By their flags: a `train` of a model's own may do more, as to merge adapters, which nothing would undo.
            for module, flag in flags.items():
                module.training = mode if is_alike else not flag
        try:
            with casting_to(autocast, device.type), _quiet(given is not arguments):
                new_sizes = partial(Sizes, known, made_hints=made_hints, are_numbers=are_numbers, samples=samples)
                return _record_call(model, given, call, device, new_sizes, unsplit_inputs, tables, unseen)
        finally:
            for module, flag in flags.items():
                module.training = flag

    record, both = record_as(flags[model]), False
    reads, left, flag_reads, given_reads = [record.reads], set(record.left), [record.modes], [record.given_reads]
    modes_after, set_modes = {flags[model]: record.modes_after}, set(record.set_modes)
    for is_alike in (False, True) if is_mixed else (False,):
        with contextlib.suppress(Untraceable):
            other = record_as(not flags[model])
            left, set_modes = left | other.left, set_modes | other.set_modes
            modes_after[not flags[model]] = other.modes_after
            record.laid_out |= other.laid_out
            other.laid_out |= record.laid_out
            # Where a module hands on what it is given, as dropped paths do in evaluation, training tells the values
            # apart.
            training, evaluation = (record, other) if flags[model] else (other, record)
            if both := modes.merge_records(training, evaluation):
                record, reads = training, [training.reads, evaluation.reads]
                flag_reads = [training.modes, evaluation.modes]
                given_reads = [training.given_reads, evaluation.given_reads]
                break
        if is_mixed and not is_alike:
            record = record_as(flags[model])  # a merge that fails has changed it
    signature.refuse_other_layout(arguments, record.laid_out)
    found = find_units(record)
    leaves = {unit.name: unit.apart for unit in found.all if unit.apart}
    # These run as they are, and read what their attributes are then.
    whole_calls = {unit.item.name for unit in found.of.values() if isinstance(unit.item, Call)}

    def is_opened(read: AttributeRead) -> bool:
        return any(whole_calls.isdisjoint(during) for during in read.during)

    fixed = {key: read.value for each in reads for key, read in each.items() if is_opened(read)}
    read_given = {name: read.value for each in given_reads for name, read in each.items() if is_opened(read)}
    read_modes: dict[Reader, dict[bool, bool]] = {}
    for each in flag_reads:
        for reader, read in each.items():
            if is_opened(read):
                read_modes.setdefault(reader, {}).update([read.value])
    sizes, opened = find_fixed_sizes(record), _list_opened_modules(record.root, found)
    mode = record.root.training
    for number in sorted({each for _, each in sizes.numbers} if not are_numbers else ()):
        for places in group_places(record, arguments, number):
            if not any(place in places for place, _ in sizes.numbers):
                continue
            # Where only modules that run as they are take a size for a number, any other is right too.
            with contextlib.suppress(Untraceable):
                other_sizes = with_sizes(arguments, dict.fromkeys(places, 2 * number))
                other = record_as(mode, other_sizes)  # first, since most models take no others
                if modes.do_the_same(record_as(mode), other) and are_free(
                    record, lambda unseen: record_as(mode, unseen=unseen), opened, places
                ):
                    sizes = sizes.without(places)
    if both and is_alike:
        # These were in one mode in both records, and nobody knows what they do in the other.
        paths = {module: path for path, module in model.named_modules()}
        stuck = {paths[module]: flag for module, flag in flags.items() if flag != flags[model]}
        read_modes |= {("", path): {True: flag, False: flag} for path, flag in stuck.items() if path in opened}
    used = {name for unit in found.all for name in unit.arguments}
    unread = [name for name in record.arguments if name not in used]

    def is_asked(name: str) -> bool:
        without = {key: value for key, value in arguments.items() if key != name}
        try:
            return not modes.do_the_same(record_as(mode), record_as(mode, without), with_inputs=False)
        except Untraceable:
            return True

    asked = frozenset(filter(is_asked, unread))
    assumptions, of_made = find_assumptions(
        record, opened, lambda places, made: record_as(mode, with_sizes(arguments, places), made)
    )
    forget_single_samples(record, opened, lambda: record_as(mode, samples=1))
    sizes = replace(sizes, assumptions=assumptions, made=of_made)
    return Traced(
        model, record, found, leaves, both, samples.pop(), fixed, opened, sizes, frozenset(left), asked, read_modes,
        {mode: {path: after[path] for path in set_modes} for mode, after in modes_after.items()}, read_given,
    )  # fmt: skip


def _list_opened_modules(root: Call, units: Units) -> frozenset[str]:
    """Return the paths of the modules whose code a cut may open, and of those that only hold others."""
    never_cut = {unit.item for unit in units.of.values() if isinstance(unit.item, Call)}
    opened, closed, calls = set[str](), set[str](), [root]
    while calls:
        call = calls.pop()
        if call in never_cut:
            closed.add(call.path)
        else:
            opened.add(call.path)
            calls += call.calls()
    parts = [path.split(".") for path in (*opened, *closed) if path]
    around = {".".join(each[:count]) for each in parts for count in range(len(each))}
    return frozenset(opened | {path for path in around if not any(_is_inside(path, each) for each in closed - opened)})


def _is_inside(path: str, other: str) -> bool:
    return path == other or path.startswith(f"{other}.")


def _record_call(
    model: nn.Module,
    arguments: Mapping[str, Any],
    call: Any,
    device: torch.device,
    new_sizes: Callable[..., Sizes],
    unsplit_inputs: Collection[str],
    tables: KeptTables,
    known_unseen: Mapping[str, str],
) -> ForwardRecord:
    unseen = dict(known_unseen)
    sure, guesses = set[str](), True
    while True:
        recorder = Recorder(model, new_sizes(guesses=guesses), device, unseen, unsplit_inputs, sure)
        try:
            kept = tables.kept(recorder.takes_keys)
            with attributes_kept(model), kept, _python_draws_nothing(model), disable_compilation():
                record = recorder.run(model, arguments, call)
            if recorder.attributes.changed or recorder.attributes.unsure:

                def record_with(values: Mapping[Key, Any], sizes: Sizes) -> ForwardRecord:
                    again = Recorder(model, sizes, device, unseen, unsplit_inputs, sure)
                    kept = tables.kept(again.takes_keys)
                    with attributes_kept(model), kept, _python_draws_nothing(model), disable_compilation():
                        for (path, name), value in values.items():
                            # A copy of a container, which forward changes.
                            vars(model.get_submodule(path))[name] = pytree.tree_map(lambda leaf: leaf, value)
                        return again.run(model, arguments, call)

                _refuse_changes(model, recorder, record_with, partial(new_sizes, guesses=guesses))
            sizes = recorder.sizes
            if not sizes.are_fixed_by(sizes.guessed) and sizes.guessed.isdisjoint(
                symbols_of(record.iterate_conditions())
            ):
                return record
            guesses = False  # code goes by such a size, and not by what was guessed for it
        except Untraceable as error:
            if tables.learn_key(error.__cause__):
                continue
            if not recorder.sizes.guessed:
                raise
            guesses = False  # code relies on its being that of an argument
        except GuessFailed as failed:
            sure.add(failed.path)
        except SizesFixed as fixed:
            if not fixed.path or fixed.path in unseen:
                raise Untraceable(f"{fixed.path or 'the model'}: {fixed.reason}") from fixed
            unseen.update(dict.fromkeys(_list_alike(model, fixed.path), fixed.reason))


def _list_alike(model: nn.Module, path: str) -> list[str]:
    """Return the path of a module that fixes sizes, and those of others with the same code, which do too: else the
    trace would begin anew for each layer."""
    module = model.get_submodule(path)
    if type(module).__module__.startswith("torch."):
        return [path]

    def list_code(each: nn.Module) -> dict[str, Any]:
        return {name: held for name, held in vars(each).items() if callable(held) and not isinstance(held, nn.Module)}

    code = list_code(module)
    same = [name for name, each in model.named_modules() if type(each) is type(module) and list_code(each) == code]
    return [path, *(name for name in same if name and not (_is_inside(path, name) or _is_inside(name, path)))]


def _refuse_changes(
    model: nn.Module, recorder: Recorder, record_with: RecordWith, new_sizes: Callable[[], Sizes]
) -> None:
    """PipelineError if a forward that has changed attributes does something else the next time, or some time."""
    changed, unsure = recorder.attributes.changed, recorder.attributes.unsure
    for key, both in unsure.items():
        with contextlib.suppress(Untraceable, SizesFixed, GuessFailed):  # as where a table is said to be there
            found = find_threshold({**changed, key: both}, record_with, new_sizes)
            if found is not None and found[0] == key:
                raise changes_itself(model, key, *both, found[1])
    if not changed:
        return
    try:
        second = record_with({key: after for key, (_, after) in changed.items()}, new_sizes())
        if not modes.are_records_equal(recorder.record, second):
            key, (before, after) = next(iter(changed.items()))
            raise changes_itself(model, key, before, after)
        if (found := find_threshold(changed, record_with, new_sizes)) is not None:
            key, count = found
            raise changes_itself(model, key, *changed[key], count)
    except (Untraceable, SizesFixed, GuessFailed):
        return  # nothing can be said; where it is cut, the comparison with the whole model will


@contextlib.contextmanager
def attributes_kept(model: nn.Module) -> Iterator[None]:
    """Restore at the end what modules keep in attributes, such as a table made at the first call, or the last result.

    They would else be tensors without data. So are hooks: a first call may register some, and leave a flag that they
    are there.
    """
    kept: list[tuple[Any, Any]] = []
    for module in model.modules():
        kept.append((module.__dict__, dict(module.__dict__)))
        kept += [(held, held.copy()) for held in module.__dict__.values() if type(held) in _CONTAINERS]
    try:
        yield
    finally:
        for held, before in kept:
            held.clear()
            (held.extend if isinstance(held, list | deque) else held.update)(before)


@contextlib.contextmanager
def _quiet(is_wanted: bool) -> Iterator[None]:
    """Let torch say nothing of an operation that fails, where a model is only tried with other arguments."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before = log.disabled
    log.disabled = before or is_wanted
    try:
        yield
    finally:
        log.disabled = before


@contextlib.contextmanager
def _python_draws_nothing(model: nn.Module) -> Iterator[None]:
    """Untraceable if something inside draws random numbers that are not torch's, also from a generator of its own: what
    follows from them would be the same for ever. They are afterwards what they were."""
    draws = ScriptDraws(model)
    before = draws.get_state()
    with draws.at(before):
        yield
        drawn = draws.have_drawn(before)
    if drawn:
        raise Untraceable(
            "its code draws from Python's or numpy's random numbers, of which a trace sees one draw only: draw with "
            "torch"
        )


def _build_graph(record: ForwardRecord, found: Units, samples: int) -> Graph:
    hints = record.sizes.hints(samples)
    users: dict[str, int] = {}
    for unit in found.all:
        for name in unit.weights:
            users[name] = users.get(name, 0) + 1
    parameters = {name: weight for name, weight in record.weights.items() if isinstance(weight, nn.Parameter)}
    ties = {name for name, count in users.items() if count > 1 and name in parameters}
    value_names = {index: name for unit in found.all for name, index in unit.values.items()}
    nodes: list[GraphNode] = []
    for unit in found.all:
        single = len(unit.values) <= 1
        sizes = {name: _count_bytes(record.values[index], hints) for name, index in unit.values.items()}
        own = [parameters[name] for name in unit.weights & parameters.keys() if name not in ties]
        nodes.append(
            GraphNode(
                name=unit.name,
                inputs=tuple(value_names[index] for index in sorted(unit.reads) if index not in found.free),
                parameters=sum(map(_count_weight_bytes, own)),
                output=sum(sizes.values()) if single else 0,
                colocate=unit.group,
                ties=tuple(sorted(unit.weights & ties)),
                gradient=any(index in found.learning for index in unit.values.values()),
                frozen=sum(_count_weight_bytes(each) for each in own if not each.requires_grad),
            )
        )
        if not single:
            for name, index in unit.values.items():
                learns = index in found.learning
                nodes.append(GraphNode(name, (unit.name,), output=sizes[name], colocate=unit.group, gradient=learns))
    return Graph(
        tuple(nodes),
        tuple((name, _count_weight_bytes(parameters[name])) for name in sorted(ties)),
        tuple(name for name in sorted(ties) if not parameters[name].requires_grad),
    )


def _count_bytes(tensor: Any, hints: Mapping[Any, int]) -> int:
    count = 1
    for size in tensor.shape:
        count *= int(evaluate_size(size, hints))
    return count * int(tensor.dtype.itemsize)


def _count_weight_bytes(weight: Any) -> int:
    return int(weight.numel() * weight.element_size())


def _get_wanted_stage(item: Item | None) -> int | None:
    """The stage of the innermost context: that of the item, or of the calls around it."""
    while item is not None:
        if item.stage is not None:
            return item.stage
        item = item.owner
    return None
