"""Cuts a traced model: for each stage, the largest calls of original modules that are wholly its own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from everstep.pipeline.errors import PipelineError
from everstep.pipeline.frontend import placement
from everstep.pipeline.frontend.attributes import FixedAttributes
from everstep.pipeline.frontend.made_conditions import GIVEN, MadeConditions, share_made_conditions
from everstep.pipeline.frontend.record import Call, Op, iterate_made_values, iterate_parts
from everstep.pipeline.frontend.recorder import HOOKS
from everstep.pipeline.frontend.refs import (
    Argument,
    Constant,
    Here,
    Maker,
    Ref,
    Size,
    Template,
    ValueRef,
    Weight,
    compile_binder,
    compile_maker,
    compile_result_binder,
    iterate_references,
    list_plain_leaves,
)
from everstep.pipeline.frontend.result_kinds import ResultKinds
from everstep.pipeline.frontend.sizes import are_sizes_visible, find_made_places, find_places, symbols_of
from everstep.pipeline.frontend.skeleton import Drawing, Original, weight_holder
from everstep.pipeline.frontend.stages import (
    INPUT,
    SizeRules,
    StageModule,
    StageUses,
    Step,
    draw_with_state,
    make_context,
    read_argument,
    register_tensor_hook,
)
from everstep.pipeline.frontend.trace import Traced
from everstep.pipeline.frontend.tree import Tree
from everstep.pipeline.frontend.units import OUTPUT, Item, Unit
from everstep.pipeline.frontend.unseen import UnseenCall


def split_model(model: Traced | Tree, stage_of: Mapping[str, int] | None = None) -> list[StageModule]:
    """Split a model into stages, and return them in order. They share their modules with the model.

    Args:
        model: The traced model, or its chain of blocks.
        stage_of: The stage of nodes, or of modules with all that is in them; the rest follows, as
            `placement.complete_placement` says. None for what `with pipeline.stage(i)` has placed.

    Raises:
        PipelineError: The placement cannot be.
    """
    if isinstance(model, Tree):
        return model.split(stage_of or {})
    chosen = placement.complete_placement(model.graph, model.manual if stage_of is None else stage_of)
    last = max(chosen.values())
    if chosen[OUTPUT] != last:
        raise PipelineError(
            f"the model's output is in stage {chosen[OUTPUT]}, and must be in the last one, {last}: change stage_of"
        )
    original = Original(model.model)
    cuts = [_Cut(model, original, chosen, index) for index in range(last + 1)]
    # What nobody uses is in the first stage, so that checkpoints are complete.
    cuts[0].unused = set(model.record.weights).difference(*(cut.find_held_weights() for cut in cuts))
    _watch_conditions(cuts)
    whole = {call for cut in cuts for item in cut.items if isinstance(item, Call) for call in item.all_calls()}
    opened = [call for cut in cuts for call in cut.list_opened() if call not in whole]
    share_made_conditions(model.record, opened, model.sizes.made, [cut.made_conditions for cut in cuts])
    return [cut.build_stage() for cut in cuts]


def _watch_conditions(cuts: Iterable[_Cut]) -> None:
    """Let a stage read the arguments that show whether a condition on sizes holds that no stage would see as it is, as
    one on the lengths of two arguments that two stages read."""
    conditions = {cut: cut.list_conditions() for cut in cuts}
    seen = {each for cut, found in conditions.items() for each in cut.filter_visible(found)}
    for cut, found in conditions.items():
        unseen = [each for each in found if each not in seen]
        cut.watched = cut.filter_visible(unseen, with_arguments=True) if unseen else []
        seen.update(cut.watched)


def node_modules(model: Traced) -> dict[str, StageModule]:
    """Each node as a stage of its own, to be measured; the values of in-place operations are then no leaves."""
    chosen = {unit.name: index for index, unit in enumerate(model.units.all)}
    original = Original(model.model)
    return {unit.name: _Cut(model, original, chosen, index).build_stage() for index, unit in enumerate(model.units.all)}


class _Cut:
    """One stage in the making."""

    def __init__(self, model: Traced, original: Original, stage_of: Mapping[str, int], index: int) -> None:
        self.model, self.original, self.index = model, original, index
        self.record, self.units = model.record, model.units
        self.own = [unit for unit in self.units.all if stage_of[unit.name] == index]
        self.mine = set(self.own)
        self.made = {value for unit in self.own for value in self._iterate_made(unit)}
        self.given = {value for unit in self.own for value in unit.reads} - self.made - self.units.free.keys()
        self.opened: list[Call] = []  # calls of which it has only a part
        self.unused: set[str] = set()  # weights that no stage uses, and that this one keeps
        self.watched: list[Any] = []  # conditions on sizes that no other stage sees
        self.items = self._add_free_operations(list(self._iterate_items(self.record.root, whole=True)))
        self.made_conditions = MadeConditions(self.record, self.given, self.items)

    def build_stage(self) -> StageModule:
        items = self.items
        has_output = (result := self._find_result()) is not None
        names = {value: name for unit in self.units.all for name, value in unit.values.items()}
        module, drawing = self._make_module(items)
        bind = self._make_binder(module)
        sizes = self._list_sizes(items, result)
        arguments, known = self._find_arguments(symbols_of([*(size.expr for size in sizes), *self.watched]))
        inputs: dict[str, int | None] = {INPUT + name: None for name in arguments}
        inputs |= {names[value]: value for value in sorted(self.given)}
        used = {value for unit in self.units.all if unit not in self.mine for value in unit.reads}
        outputs = {names[value]: value for value in sorted(self.made & used)}
        own = find_made_places(symbols_of(size.expr for size in sizes), known, map(self._list_made_shapes, items))
        seen = {place.symbol for places in own.values() for place in places}
        # A condition on sizes that this stage does not see is another's.
        conditions = [each for each in self.list_conditions() if are_sizes_visible(symbols_of([each]) - seen, known)]
        wanted = symbols_of([*(size.expr for size in sizes), *conditions]) - seen
        keep = set(outputs.values()) | _list_values(result) | (more := self.made_conditions).list_values()
        keep |= {place.tensor.index for places in own.values() for place in places}
        steps = [
            self._make_step(item, module, bind, forget, drawing) for item, forget in self._list_forgotten(items, keep)
        ]
        return StageModule(
            self.index,
            module,
            inputs,
            outputs,
            steps,
            compile_maker(result, bind) if has_output else None,
            SizeRules(
                [*find_places(wanted, known), *more.places.get(GIVEN, ())],
                sizes,
                [*conditions, *more.conditions],
                {number: [*own.get(number, ()), *more.places.get(number, ())] for number in {*own, *more.places}},
                self.model.record.sizes.batch,
            ),
            self.model.both,
            StageUses(
                self._find_changed_arguments().intersection(arguments) | self._find_passed_values(inputs, has_output),
                self._find_written_weights(),
                self._list_used_weights(),
                self._number_repeats(items),
                {name for name, value in outputs.items() if self._is_end(value)},
            ),
            next((unit.name for unit in self.own for part in iterate_parts(unit.item) if _has_listeners(part)), ""),
        )

    def list_conditions(self) -> list[Any]:
        """Return the conditions on sizes of the code that it does a part of, or that is left out everywhere."""
        found = [self.record.sizes.simplify(each) for call in self.list_opened() for each in call.conditions]
        return list(dict.fromkeys(found))

    def list_opened(self) -> list[Call]:
        """Return the calls that it does a part of, or that are left out everywhere."""
        left_out = (call for call in self.record.root.all_calls() if self._is_left_out(call))
        return list(dict.fromkeys([*self.opened, *left_out]))

    def filter_visible(self, conditions: Iterable[Any], *, with_arguments: bool = False) -> list[Any]:
        """Return those of which the shapes of what it is given show if they hold, or those of all arguments would."""
        needed = symbols_of(size.expr for size in self._list_sizes(self.items, self._find_result()))
        _, known = self._find_arguments(needed)
        if with_arguments:
            known |= {
                Argument(name, path): each.shape
                for name, found in self.record.arguments.items()
                for path, each in found.items()
            }
        return [each for each in conditions if are_sizes_visible(symbols_of([each]), known)]

    def _find_result(self) -> Template:
        """Return what the model returns, if it is made here."""
        return self.record.root.outputs if any(unit.name == OUTPUT for unit in self.own) else None

    def _list_used_weights(self) -> list[str]:
        """Return the stage's weights in the order in which its forward first uses them, those of one module as
        registered."""
        place = {name: number for number, name in enumerate(self.record.weights)}
        return list(dict.fromkeys(name for unit in self.own for name in sorted(unit.weights, key=place.__getitem__)))

    def _find_written_weights(self) -> set[str]:
        """The weights, as buffers, that its forward changes."""
        memory = {each for unit in self.own for part in iterate_parts(unit.item) for each in part.mutates}
        return {
            name for each, name in self.record.held.items() if each in memory
        } | self.record.replaced & self.find_held_weights()

    def _find_changed_arguments(self) -> set[str]:
        """The arguments that it changes in place, or of which code asks how they lie in memory."""
        memory = {each for unit in self.own for part in iterate_parts(unit.item) for each in part.mutates}
        return {name for each, name in self.record.given.items() if each in memory} | self.record.laid_out

    def _find_passed_values(self, inputs: Mapping[str, int | None], has_output: bool) -> set[str]:
        """The values of other stages that the model returns as they are, which a loss may change in place, as it may
        in one process."""
        if not has_output:
            return set()
        given = _list_values(self.record.root.outputs)
        return {name for name, value in inputs.items() if value in given}

    def _number_repeats(self, items: Iterable[Item]) -> dict[str, tuple[int, ...]]:
        found: dict[str, list[int]] = defaultdict(list)
        for item in items:
            for call in item.all_calls() if isinstance(item, Call) else ():
                found[call.path].append(call.repeat)
        return {path: tuple(each) for path, each in found.items() if each != list(range(len(each)))}

    def _is_end(self, value: int) -> bool:
        """Tell whether a value with a gradient is used without it; one that has none may get one by mistake, which the
        engine sees."""
        return self.record.values[value].gradient and value not in self.units.learning

    def _find_arguments(self, symbols: Iterable[Any]) -> tuple[list[str], dict[Any, Any]]:
        """The arguments that it reads, and the shapes of all that it is given. Where those do not show one of the
        `symbols`, as for positions without a text, it reads an argument that does."""
        arguments = {name for unit in self.own for name in unit.arguments} | self.made_conditions.list_arguments()
        arguments |= set() if self.index else set(self.model.asked)  # so that somebody sees whether they are there
        shapes: dict[str, dict[Any, Any]] = {
            name: {Argument(name, path): each.shape for path, each in found.items()}
            for name, found in self.record.arguments.items()
        }
        known: dict[Any, Any] = {ValueRef(index): self.record.values[index].shape for index in self.given}
        for name in arguments:
            known |= shapes.get(name, {})
        for symbol in sorted(symbols, key=str):
            if not are_sizes_visible([symbol], known):
                shown = next((name for name in sorted(shapes) if are_sizes_visible([symbol], shapes[name])), None)
                if shown is not None:
                    arguments.add(shown)
                    known |= shapes[shown]
        return sorted(arguments), known

    def _list_made_shapes(self, item: Item) -> dict[Any, Any]:
        """Return the shapes of what a module gives that runs as it is, or has such a one inside."""
        if not isinstance(item, Call) or not any(call.opaque for call in item.all_calls()):
            return {}
        return {ValueRef(index): self.record.values[index].shape for index in sorted(_list_values(item.outputs))}

    # ---- which calls ----

    def _iterate_items(self, call: Call, *, whole: bool = False) -> Iterable[Item]:
        if whole and self._runs_whole(call):
            yield call
            return
        self.opened.append(call)
        for item in call.body:
            unit = self.units.of.get(item) if isinstance(item, Op) else None
            if unit is not None:
                if unit.item is item and unit in self.mine:
                    yield item
            elif isinstance(item, Call):
                units = self.units.list_inside(item)
                if not units.isdisjoint(self.mine):
                    if self._runs_whole(item) or any(unit.item is item for unit in units):
                        yield item
                    else:
                        yield from self._iterate_items(item)

    def _runs_whole(self, call: Call) -> bool:
        """Tell whether the original module can run: all that is inside is here, and all that it is given."""
        if call not in self.units.repeatable or not self.units.list_inside(call) <= self.mine:
            return False
        if any(unit not in self.mine for unit in self.units.entangled.get(call, ())):
            return False
        given = _list_values(call.inputs)
        here = self.made | self.given | self.units.free.keys()
        arguments = {ref.name for ref in iterate_references(call.inputs) if isinstance(ref, Argument)}
        if not self._sees_made_sizes(call.inputs):
            return False
        return given <= here and arguments <= {name for unit in self.own for name in unit.arguments}

    def _sees_made_sizes(self, template: Template) -> bool:
        """Tell whether it sees all sizes in a template that only modules know."""
        sizes = (self.record.sizes.simplify(ref.expr) for ref in iterate_references(template) if isinstance(ref, Size))
        wanted = symbols_of(sizes).intersection(self.record.sizes.made)
        shapes = [self.record.values[index].shape for index in self.made | self.given] if wanted else []
        shapes += [info.shape for found in self.record.arguments.values() for info in found.values()]
        return wanted.issubset(size for shape in shapes for size in shape)

    def _is_left_out(self, call: Call) -> bool:
        """Tell whether a call runs in no stage, as one that has handed on what it was given: it might do otherwise with
        other sizes."""
        return bool(call.conditions) and not self.units.list_inside(call)

    def _iterate_made(self, unit: Unit) -> Iterable[int]:
        return (
            index
            for part in iterate_parts(unit.item)
            for index in iterate_made_values(part)
            if self.units.makers[index] is part
        )

    def _add_free_operations(self, items: list[Item]) -> list[Item]:
        """Add the operations on sizes and constants that these items need, wherever else they are done too."""
        chosen = dict.fromkeys(items)
        inside = {op for item in items if isinstance(item, Call) for op in item.ops()}
        waiting: list[Template] = [item.inputs for item in items]
        if any(unit.name == OUTPUT for unit in self.own):
            waiting.append(self.record.root.outputs)
        given_by_calls: set[int] = set()
        for item in items:
            if isinstance(item, Call):  # one that only passes on what it is given needs it beforehand
                given_by_calls |= _list_values(item.outputs) - _list_values(item.inputs)
        while waiting:
            for ref in iterate_references(waiting.pop()):
                if isinstance(ref, ValueRef) and ref.index in self.units.free and ref.index not in given_by_calls:
                    op = self.units.free[ref.index]
                    if op not in chosen and op not in inside:
                        chosen[op] = None
                        waiting.append(op.inputs)
        return sorted(chosen, key=lambda item: item.at)

    # ---- what they become ----

    def _make_module(self, items: Iterable[Item]) -> tuple[Any, dict[Item, Drawing]]:
        whole = {item.path for item in items if isinstance(item, Call)}
        owners = {item.owner.path for item in items if isinstance(item, Op)}
        module = self.original.make_skeleton(whole, owners, self._find_weights() | self.unused)
        drawing: dict[Item, Drawing] = {}
        for item in items:
            if isinstance(item, Op) and item.draws:
                holder = module.get_submodule(item.owner.path)
                drawing[item] = Drawing()
                drawing[item].training = holder.training
                name = self.units.of[item].name.rpartition(":")[2].replace(".", "_")
                call = f"_{item.owner.repeat}" if item.owner.repeat else ""  # each has a sequence of its own
                holder.add_module(f"{name}_drawing{call}", drawing[item])
        return module, drawing

    def _find_weights(self) -> set[str]:
        used = {name for unit in self.own for name in unit.weights}
        return used | {
            ref.name for item in self.items for ref in iterate_references(item.inputs) if isinstance(ref, Weight)
        }

    def find_held_weights(self) -> set[str]:
        """All weights of this stage, by their first names: those that it uses, and the others of its modules."""
        first = {id(weight): name for name, weight in self.record.weights.items()}
        modules = [item.module for item in self.items if isinstance(item, Call)]
        inside = {first[id(each)] for module in modules for each in (*module.parameters(), *module.buffers())}
        return self._find_weights() | inside

    def _make_step(
        self,
        item: Item,
        module: Any,
        bind: Callable[[Ref], Maker],
        forget: Iterable[int],
        drawing: Mapping[Item, Drawing],
    ) -> Step:
        templates = {True: item.inputs, False: item.inputs}
        call = item if isinstance(item, Call) else item.owner
        if item.other is not None:
            templates[not call.training] = item.other
        inputs = {flag: compile_maker(found, bind) for flag, found in templates.items()}
        if isinstance(item, Call):
            other = item.outputs if item.other_outputs is None else item.other_outputs
            plain = {item.training: list_plain_leaves(item.outputs), not item.training: list_plain_leaves(other)}
            put = compile_result_binder(item.outputs, plain, item.module, item.name)
            put = ResultKinds(self.record, item, self.model.used_symbols, put).put
            func: Any = item.module
            if any(each.opaque for each in item.all_calls()):
                func = UnseenCall(self.record, item, put, FixedAttributes(self.model.model, self.model.attributes))
                put = func.put
            context = make_context(item.grad, item.autocast)
            return Step(item.name, func, item.module, inputs, put, tuple(forget), context)
        func, put = item.func, compile_binder(item.outputs)
        if item in drawing:
            func = partial(draw_with_state, drawing[item], func)
        elif func in HOOKS:
            func = partial(register_tensor_hook, func)
        owner = module.get_submodule(item.owner.path)
        unit = self.units.of.get(item)
        name = unit.name if unit is not None else f"{item.owner.name}:{item.name}"
        return Step(name, func, owner, inputs, put, tuple(forget), make_context(item.grad, item.autocast))

    def _make_binder(self, module: Any) -> Callable[[Ref], Maker]:
        constants = self.record.constants

        def bind(ref: Ref) -> Maker:
            match ref:
                case ValueRef(index):
                    return lambda frame: frame.values[index]
                case Argument(name, path):
                    return partial(read_argument, name, path)
                case Weight(name):
                    held, last = weight_holder(module, name)
                    return lambda frame: held[last]
                case Constant(place):
                    return lambda frame: constants[place]
                case Size():
                    known = self._simplify_size(ref)
                    return (lambda frame: frame.sizes[known]) if isinstance(known, Size) else (lambda frame: known)
                case Here():
                    return lambda frame: frame.device

        return bind

    def _simplify_size(self, size: Size) -> Any:
        """Simplify a size by what was found out later; return a number if it is one."""
        found = self.record.sizes.simplify(size.expr)
        return Size(found, size.kind) if symbols_of([found]) else size.kind(found)

    def _list_sizes(self, items: Iterable[Item], result: Template) -> list[Size]:
        templates = [found for item in items for found in (item.inputs, item.other)]
        sizes = (
            self._simplify_size(ref)
            for each in (*templates, result)
            for ref in iterate_references(each)
            if isinstance(ref, Size)
        )
        return list(dict.fromkeys(size for size in sizes if isinstance(size, Size)))

    def _list_forgotten(self, items: list[Item], keep: set[int]) -> Iterable[tuple[Item, list[int]]]:
        last: dict[int, Item] = {}
        for item in items:
            for ref in (*iterate_references(item.inputs), *iterate_references(item.outputs)):
                if isinstance(ref, ValueRef):
                    last[ref.index] = item
        done: dict[Item, list[int]] = defaultdict(list)
        for index, item in last.items():
            if index not in keep:
                done[item].append(index)
        return [(item, done[item]) for item in items]


def _list_values(template: Template) -> set[int]:
    return {ref.index for ref in iterate_references(template) if isinstance(ref, ValueRef)}


def _has_listeners(part: Item) -> bool:
    return isinstance(part, Op) and part.func in HOOKS
