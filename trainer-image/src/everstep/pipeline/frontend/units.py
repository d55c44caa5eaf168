"""Turn a record into nodes: what is one node, which nodes must stay together, what flows between them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.nn import Parameter

from everstep.pipeline.frontend.record import Call, ForwardRecord, Op, Untraceable, iterate_made_values, iterate_parts
from everstep.pipeline.frontend.refs import (
    Argument,
    Constant,
    Ref,
    Size,
    Template,
    ValueRef,
    Weight,
    iterate_references,
)
from everstep.pipeline.frontend.sizes import symbols_of

OUTPUT = "output"
Item = Op | Call


@dataclass(eq=False)
class Unit:
    """A node: an operation between modules, or a call of a module that is not looked into; None is the model's output.

    `values`: those that others use, by their names; `apart`: why it is one node, if there is a reason.
    """

    name: str
    item: Item | None
    reads: frozenset[int] = frozenset()
    arguments: frozenset[str] = frozenset()
    weights: frozenset[str] = frozenset()
    values: dict[str, int] = field(default_factory=dict)
    group: str = ""
    apart: str = ""


@dataclass(eq=False)
class Units:
    """`free`: operations on nothing but sizes and constants, which every stage that needs them does by itself;
    `of`: the unit of each operation and opaque call; `makers`: who makes each value; `repeatable`: the calls that can
    be made as they were; `entangled`: of calls, the units elsewhere that use a weight of their modules which nothing in
    the call does: where they are in another stage, the module must not be in the call's, or both would have it;
    `learning`: the values from whose users a gradient comes back."""

    all: list[Unit]
    free: dict[int, Op]  # by the value
    of: dict[Item, Unit]
    makers: dict[int, Item]
    repeatable: frozenset[Call]
    entangled: dict[Call, frozenset[Unit]]
    learning: frozenset[int]

    def __post_init__(self) -> None:
        self._alone = {unit: frozenset({unit}) for unit in self.all}
        self._inside: dict[Call, frozenset[Unit]] = {}

    def list_inside(self, item: Item) -> frozenset[Unit]:
        """Return the units of which something is inside an item. Each stage in the making asks for those of many."""
        if isinstance(item, Op) or item.opaque:
            return self._alone.get(self.of[item], frozenset()) if item in self.of else frozenset()
        if (known := self._inside.get(item)) is None:
            known = self._inside[item] = frozenset[Unit]().union(*map(self.list_inside, item.body))
        return known


def find_units(record: ForwardRecord) -> Units:
    """Untraceable if a module must be one node and cannot be."""
    if record.root.outputs is None:
        raise Untraceable(
            f"the model returns {record.odd}, which is neither a tensor nor a plain structure of tensors, which "
            "no stage can send: return only what the loss needs (models of transformers: config.use_cache=False)"
        )
    view = _View(record)
    view.settle(record.root)
    free = _find_free_operations(record, view)
    items = list(view.leaves(record.root))
    found = [_make_unit(name, item, view) for name, item in zip(_name_items(items), items, strict=True)]
    free_ops = set(free.values())
    found = [unit for unit in found if unit.item not in free_ops]
    output = Unit(OUTPUT, None, *_collect_uses(record.root.outputs, record.aliases))
    _read_made_sizes([*found, output], free, view, record)
    alive = _keep_alive_units(found, output, view, record)
    of = {part: unit for unit in found for part in iterate_parts(unit.item)}
    entangled = _find_entangled_calls(alive, of, record)
    _name_values(alive, free, view)
    _group_units(alive, of, record)
    repeatable = frozenset(call for call in record.root.all_calls() if view.repeatable(call))
    return Units(alive, free, of, view.makers, repeatable, entangled, _find_learning_values(record))


class _View:
    """A view of a record that shows the maker and the users of each value, and the calls that can be made as they
    were."""

    def __init__(self, record: ForwardRecord) -> None:
        self.aliases = record.aliases
        self.makers: dict[int, Item] = {}
        self.readers: dict[int, list[Item]] = defaultdict(list)
        self._repeatable: dict[Call, bool] = {}
        self._opened = {record.root}  # what draws random numbers, and cannot be one node
        self.output = {ref.index for ref in iterate_references(record.root.outputs) if isinstance(ref, ValueRef)}
        for part in iterate_parts(record.root):
            for index in iterate_made_values(part):
                self.makers.setdefault(index, part)
            for ref in iterate_references(part.inputs):
                if isinstance(ref, ValueRef):
                    self.readers[ref.index].append(part)

    def repeatable(self, call: Call) -> bool:
        """Tell whether all that flows in and out of a call does so by arguments and results."""
        if call not in self._repeatable:
            self._repeatable[call] = self._closed(call)
        return self._repeatable[call]

    def read_by(self, reader: Item | None, index: int) -> None:
        """Note one more reader of a value; None is the model's output."""
        self._repeatable.clear()
        if reader is None:
            self.output.add(index)
        else:
            self.readers[index] += iterate_parts(reader)

    def _closed(self, call: Call) -> bool:
        if call.inputs is None or call.outputs is None or call.is_lent:
            return False
        own = set(iterate_parts(call))
        if any(isinstance(part, Op) and part.draws and part.owner in self._opened for part in own):
            return False  # such draws are modules of their own, in one stage as in many
        made = {index for part in own for index in iterate_made_values(part) if self.makers[index] is part}
        given, gives = set(iterate_references(call.inputs)), set(iterate_references(call.outputs))
        for part in own:
            for ref in iterate_references(part.inputs):
                inside = isinstance(ref, ValueRef) and ref.index in made
                if isinstance(ref, ValueRef | Argument) and not inside and ref not in given:
                    return False
        outside = (index for index in made if index in self.output or not own.issuperset(self.readers[index]))
        return all(ValueRef(index) in gives for index in outside)

    def settle(self, call: Call) -> None:
        """Mark the call around a call that must run as it was, but cannot, as one that must run as it was."""
        for inside in call.calls():
            self.settle(inside)
            # What is seeded and does not draw, as attention without dropout, is less to measure where it is whole.
            if any(isinstance(item, Op) and item.seeded for item in inside.body) and not inside.whole:
                if self.repeatable(inside):
                    inside.whole = "it draws random numbers, which belong to one place"
                else:
                    self._opened.add(inside)
            if inside.whole and not self._opened.isdisjoint(inside.all_calls()):
                self._opened.difference_update(inside.all_calls())  # they run in it, as they were
                self._repeatable.clear()
            if inside.whole and not self.repeatable(inside):
                reason = f"{inside.path} must stay whole ({inside.whole}), but shares tensors beside its arguments"
                call.whole = call.whole or reason
        if not call.path and call.whole:
            raise Untraceable(f"the model itself cannot be cut: {call.whole}")

    def leaves(self, call: Call) -> Iterator[Item]:
        for item in call.body:
            if isinstance(item, Op) or ((item.whole or not any(item.calls())) and self.repeatable(item)):
                yield item
            else:
                yield from self.leaves(item)


def _collect_uses(found: Template, aliases: Mapping[int, str]) -> tuple[frozenset[int], frozenset[str], frozenset[str]]:
    refs = set(iterate_references(found))
    weights = {ref.name for ref in refs if isinstance(ref, Weight)}
    weights |= {aliases[ref.index] for ref in refs if isinstance(ref, Constant) and ref.index in aliases}
    return (
        frozenset(ref.index for ref in refs if isinstance(ref, ValueRef)),
        frozenset(ref.name for ref in refs if isinstance(ref, Argument)),
        frozenset(weights),
    )


def _make_unit(name: str, item: Item, view: _View) -> Unit:
    reads, arguments, weights = _collect_uses(item.inputs, view.aliases)
    if isinstance(item, Call):
        weights |= frozenset(item.weights)
        for part in iterate_parts(item):
            weights |= _collect_uses(part.inputs, view.aliases)[2]
    made = {index for part in iterate_parts(item) for index in iterate_made_values(part) if view.makers[index] is part}
    inside = isinstance(item, Call) and (item.opaque or any(item.calls()))
    apart = item.whole if isinstance(item, Call) and inside else ""
    unit = Unit(name, item, reads - made, arguments, weights, apart=apart)
    unit.values = {str(index): index for index in made}  # named when it is known who uses them
    return unit


def _name_items(items: list[Item]) -> Iterator[str]:
    seen: dict[str, int] = defaultdict(int)
    for item in items:
        name = item.name if isinstance(item, Call) else f"{item.owner.name}:{item.name}"
        name = f"{OUTPUT}@0" if name == OUTPUT else name
        seen[name] += 1
        yield f"{name}.{seen[name] - 1}" if seen[name] > 1 else name


def _find_free_operations(record: ForwardRecord, view: _View) -> dict[int, Op]:
    """Operations that depend on sizes, buffers and constants only, by the values that they make."""
    changed = {memory for op in record.root.ops() for memory in op.mutates}
    changed |= {memory for call in record.root.all_calls() for memory in call.mutates}
    found: dict[int, Op] = {}
    direct = {item for item in view.leaves(record.root) if isinstance(item, Op)}
    for op in record.root.ops():
        if op not in direct or op.draws or op.touches & changed:
            continue
        given = [
            ref for ref in iterate_references(op.inputs) if isinstance(ref, ValueRef | Argument | Weight | Constant)
        ]
        if all(_is_constant(ref, found, record) for ref in given) and not any(
            record.values[index].gradient for index in iterate_made_values(op)
        ):
            found.update((index, op) for index in iterate_made_values(op) if view.makers[index] is op)
    return found


def _read_made_sizes(found: list[Unit], free: Mapping[int, Op], view: _View, record: ForwardRecord) -> None:
    """Let units read a value that shows a size of which they make something, where only the module that makes the value
    knows it and nothing else that they read shows it: positions in texts that a module has cut, which have no text."""
    shown = {size for each in record.arguments.values() for info in each.values() for size in info.shape}
    wanted, makers = set(record.sizes.made) - shown, defaultdict[Any, list[int]](list)
    results = {index for unit in found if wanted for index in _list_results(unit.item)} - free.keys()
    for index in sorted(results):
        for size in {*record.values[index].shape} & wanted:
            makers[size].append(index)
    for unit in found if makers else ():
        waiting, sizes = [record.root.outputs if unit.item is None else unit.item.inputs], set[Any]()
        while waiting:
            for ref in iterate_references(waiting.pop()):
                if isinstance(ref, Size):
                    sizes |= symbols_of([record.sizes.simplify(ref.expr)])
                elif isinstance(ref, ValueRef) and ref.index in free:
                    waiting.append(free[ref.index].inputs)
        sizes.difference_update(size for index in unit.reads - free.keys() for size in record.values[index].shape)
        for size in sizes & makers.keys():
            before = [each for each in makers[size] if unit.item is None or view.makers[each].at < unit.item.at]
            if before:
                index = next((each for each in before if _is_handed_on(each, unit.item, view)), before[0])
                unit.reads |= {index}
                view.read_by(unit.item, index)


def _list_results(item: Item | None) -> Iterator[int]:
    """The values of a unit that others can have: of a call, those that it returns."""
    return iterate_made_values(item) if item is not None else iter(())


def _is_handed_on(index: int, reader: Item | None, view: _View) -> bool:
    """Tell whether all calls around the maker of a value that are not around its reader return it, so that they can be
    made as they were."""
    left = set(_iterate_owners(view.makers[index])).difference(_iterate_owners(reader))
    return all(ValueRef(index) in set(iterate_references(call.outputs)) for call in left)


def _iterate_owners(item: Item | None) -> Iterator[Call]:
    """The calls around an item, but for the model's own."""
    while item is not None and item.owner is not None and item.owner.path:
        item = item.owner
        yield item


def _is_constant(ref: Ref, found: dict[int, Op], record: ForwardRecord) -> bool:
    if isinstance(ref, ValueRef):
        return ref.index in found
    # Parameters have owners, even those that do not learn.
    if isinstance(ref, Constant):
        return ref.index not in record.aliases
    return isinstance(ref, Weight) and not isinstance(record.weights[ref.name], Parameter)


def _find_learning_values(record: ForwardRecord) -> frozenset[int]:
    """Find the values that the result is differentiated through. What is used by `detach`, without gradients or by
    functions that have none, as `argmax`, gives its makers no gradient, and not one of zeros, in one process."""
    found = {ref.index for ref in iterate_references(record.root.outputs) if isinstance(ref, ValueRef)}
    for part in reversed(list(iterate_parts(record.root))):
        made = set(iterate_made_values(part))
        # What changes memory may be differentiated through that.
        if not made or part.mutates or any(record.values[index].gradient for index in made & found):
            found.update(ref.index for ref in iterate_references(part.inputs) if isinstance(ref, ValueRef))
    return frozenset(index for index in found if record.values[index].gradient)


def _find_entangled_calls(
    alive: list[Unit], of: dict[Item, Unit], record: ForwardRecord
) -> dict[Call, frozenset[Unit]]:
    """Find the calls of modules with weights that units elsewhere use, and nothing in the call; those that are never
    cut use these weights too from now on, so that they are shared."""
    users: dict[str, set[Unit]] = defaultdict(set)
    for unit in alive:
        for name in unit.weights:
            users[name].add(unit)
    first = {id(weight): name for name, weight in record.weights.items()}
    found: dict[Call, frozenset[Unit]] = {}
    for call in record.root.all_calls():
        inside = {of[part] for part in iterate_parts(call) if part in of}
        more = {
            name
            for each in (*call.module.parameters(), *call.module.buffers())
            if (name := first.get(id(each), "")) in users and inside.isdisjoint(users[name])
        }
        if more:
            found[call] = frozenset(unit for name in more for unit in users[name])
            for unit in inside:
                if unit.item is call:
                    unit.weights |= more
    return found


def _keep_alive_units(found: list[Unit], output: Unit, view: _View, record: ForwardRecord) -> list[Unit]:
    """Return the units without those that neither the output nor lasting memory depends on."""
    needed = set(output.reads)
    alive = []
    changed: set[int] = set(record.lasting)
    # What the model returns may be written last by an operation that gives nothing, as `logits[:, 0] = 0` does.
    makers = {part for index in output.reads if (part := view.makers.get(index)) is not None}
    changed |= {memory for part in makers for memory in part.touches}
    for unit in reversed(found):
        touches = {memory for part in iterate_parts(unit.item) for memory in part.touches}
        mutates = {memory for part in iterate_parts(unit.item) for memory in part.mutates}
        if needed & set(unit.values.values()) or mutates & changed:
            needed |= unit.reads
            changed |= touches  # whoever changed what it uses is needed as well
            alive.append(unit)
    return [*reversed(alive), output]


def _name_values(alive: list[Unit], free: dict[int, Op], view: _View) -> None:
    used = {index for unit in alive for index in unit.reads}
    # What a free operation reads is free too, so only units make names.
    for unit in alive:
        own = sorted(index for index in unit.values.values() if index in used)
        several = len(own) > 1
        unit.values = {f"{unit.name}[{place}]" if several else unit.name: index for place, index in enumerate(own)}


def _group_units(alive: list[Unit], of: dict[Item, Unit], record: ForwardRecord) -> None:
    """Groups of units that must be one stage, under the name of their first."""
    place = {unit: index for index, unit in enumerate(alive)}
    leader = list(range(len(alive)))

    def find(index: int) -> int:
        while leader[index] != index:
            leader[index] = index = leader[leader[index]]
        return index

    def join(one: int, other: int) -> None:
        first, second = sorted((find(one), find(other)))
        leader[second] = first

    for one, other in _iterate_neighbours(of, place, record):
        join(place[one], place[other])
    while ends := _group_dead_ends(alive, find):
        for end, partner in ends:
            join(end, partner)
    sizes = Counter(find(index) for index in range(len(alive)))
    for index, unit in enumerate(alive):
        if sizes[find(index)] > 1 or len(unit.values) > 1:
            unit.group = alive[find(index)].name


def _group_dead_ends(alive: list[Unit], find: Callable[[int], int]) -> list[tuple[int, int]]:
    """Groups from which nothing leads to the output, as what only writes statistics, and with whom they are, so that no
    stage comes after the output: the last whose values they use, or the output itself."""
    makers = {index: at for at, unit in enumerate(alive) for index in unit.values.values()}
    given = [(find(at), makers[index]) for at, unit in enumerate(alive) for index in unit.reads if index in makers]
    leads = {find(maker) for group, maker in given if group != find(maker)} | {find(len(alive) - 1)}
    last = {find(at): len(alive) - 1 for at in range(len(alive)) if find(at) not in leads}
    found = {group: [maker for reader, maker in given if reader == group and find(maker) != group] for group in last}
    return [(group, max(found[group], default=last[group])) for group in last]


def _iterate_neighbours(
    of: dict[Item, Unit], place: dict[Unit, int], record: ForwardRecord
) -> Iterator[tuple[Unit, Unit]]:
    ordered = sorted((part for part, unit in of.items() if unit in place), key=lambda part: part.at)
    # Memory that changes: all who used it before must see it as it was. If it lasts, all users, before and after.
    users: dict[int, list[Unit]] = defaultdict(list)
    everyone: dict[int, list[Unit]] = defaultdict(list)
    changed: set[int] = set()
    for part in ordered:
        for memory in part.mutates:
            changed.add(memory)
            for user in users[memory]:
                yield user, of[part]
            users[memory] = []
        for memory in part.touches | part.mutates:
            users[memory].append(of[part])
            everyone[memory].append(of[part])
    for memory in changed & record.lasting:
        yield from zip(everyone[memory], everyone[memory][1:], strict=False)
    # Calls of one module that draws follow each other in its sequence of random numbers, unless they are numbered.
    drawing: dict[str, Unit] = {}
    for part in ordered:
        item = of[part].item
        if (
            isinstance(item, Call)
            and (item.opaque or (isinstance(part, Op) and part.draws))
            and not _is_numbered_draw(item)
        ):
            yield drawing.setdefault(item.path, of[part]), of[part]


def _is_numbered_draw(call: Call) -> bool:
    """Tell whether what a call draws follows from which call of its module it is.

    It does for a module of torch's own that keeps nothing, such as the dropout that a model uses at both ends of its
    layers.
    """
    module = call.module
    kept = (*module.children(), *module.parameters(), *module.buffers())
    return not call.opaque and not kept and type(module).__module__.startswith("torch.nn.modules")
