"""Cuts a model that cannot be traced, between the blocks of a chain."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import nn

from everstep.pipeline.errors import PipelineError
from everstep.pipeline.frontend import placement
from everstep.pipeline.frontend.compiled import is_compiled
from everstep.pipeline.frontend.placement import built_in
from everstep.pipeline.frontend.refs import Argument, Maker, Ref, ValueRef, compile_binder, compile_maker
from everstep.pipeline.frontend.skeleton import Original
from everstep.pipeline.frontend.stages import INPUT, SizeRules, StageModule, StageUses, Step
from everstep.pipeline.graph import Graph, GraphNode


@dataclass(frozen=True, eq=False)
class Tree:
    """A chain: each block is called with what the one before gave, as `nn.Sequential` does. `arguments`: of the first;
    `reason`: why the model was not traced."""

    model: nn.Module
    blocks: tuple[str, ...]
    arguments: tuple[str, ...]
    reason: str = ""

    @cached_property
    def graph(self) -> Graph:
        """Return the graph without times and activations, which only a measurement gives."""
        names = [name for name, parameter in self.model.named_parameters()]
        first = {id(parameter): name for name, parameter in self.model.named_parameters()}
        sizes = {
            name: parameter.numel() * parameter.element_size() for name, parameter in self.model.named_parameters()
        }
        used = {
            block: {first[id(each)] for each in self.model.get_submodule(block).parameters()} for block in self.blocks
        }
        learns = {name for name, parameter in self.model.named_parameters() if parameter.requires_grad}
        ties = {name for name in names if sum(name in each for each in used.values()) > 1}
        nodes = [
            GraphNode(
                block,
                self.blocks[at - 1 : at] if at else (),
                parameters=sum(sizes[name] for name in used[block] - ties),
                ties=tuple(sorted(used[block] & ties)),
                gradient=any(used[each] & learns for each in self.blocks[: at + 1]),
                frozen=sum(sizes[name] for name in used[block] - ties - learns),
            )
            for at, block in enumerate(self.blocks)
        ]
        shared = tuple((name, sizes[name]) for name in sorted(ties))
        return Graph(tuple(nodes), shared, tuple(sorted(ties - learns)))

    @cached_property
    def manual(self) -> dict[str, int]:
        """The blocks that `with pipeline.stage(i)` has placed."""
        built = {name: built_in(self.model.get_submodule(name)) for name in self.blocks}
        return {name: stage for name, stage in built.items() if stage is not None}

    @property
    def varying(self) -> frozenset[str]:
        """Return the names of the values whose shapes may depend on data: any may, as nobody has seen what is done."""
        return frozenset(self.blocks)

    @property
    def opened(self) -> frozenset[str]:
        """Return the paths of the modules that hold the blocks, and are not called."""
        parts = [name.split(".") for name in self.blocks]
        return frozenset(".".join(each[:count]) for each in parts for count in range(len(each)))

    def split(self, stage_of: Mapping[str, int]) -> list[StageModule]:
        """Return the stages, as `split_model` does; what is not placed follows the block before it."""
        chosen = placement.complete_placement(self.graph, stage_of or self.manual)
        return [
            self._stage(stage, [at for at, name in enumerate(self.blocks) if chosen[name] == stage])
            for stage in range(max(chosen.values()) + 1)
        ]

    def node_modules(self) -> dict[str, StageModule]:
        """Each block as a stage of its own, to be measured."""
        return {name: self._stage(at, [at]) for at, name in enumerate(self.blocks)}

    def _stage(self, index: int, places: Sequence[int]) -> StageModule:
        names = [self.blocks[at] for at in places]
        first, last = places[0], places[-1]
        weights = {name for block in names for name in self._weights(block)}
        module = Original(self.model).make_skeleton(names, [], weights)
        inputs: dict[str, int | None] = (
            {self.blocks[first - 1]: first - 1} if first else {INPUT + name: None for name in self.arguments}
        )
        steps = []
        for at in places:
            given = (ValueRef(at - 1),) if at else tuple(Argument(name) for name in self.arguments)
            make = compile_maker((given, {}), _bind_reference)
            block = module.get_submodule(self.blocks[at])
            forget = (at - 1,) if at else ()
            steps.append(
                Step(self.blocks[at], block, block, {True: make, False: make}, compile_binder(ValueRef(at)), forget)
            )
        ends = last == len(self.blocks) - 1
        outputs = {} if ends else {self.blocks[last]: last}
        result = compile_maker(ValueRef(last), _bind_reference) if ends else None
        # Nobody has seen what the blocks do: they may change what they are given, and any buffer.
        writes = [name for name, _ in module.named_buffers()]
        changed = inputs if first else self.arguments
        return StageModule(index, module, inputs, outputs, steps, result, SizeRules(), True, StageUses(changed, writes))

    def _weights(self, block: str) -> set[str]:
        """Return the weights of a block by their first names in the model, so that ties keep them."""
        first = {id(each): name for name, each in (*self.model.named_parameters(), *self.model.named_buffers())}
        module = self.model.get_submodule(block)
        return {first[id(each)] for each in (*module.parameters(), *module.buffers())}


def build_tree(model: nn.Module, blocks: Sequence[str | nn.Module] | None = None, *, reason: str = "") -> Tree:
    """The chain of an `nn.Sequential`, with those inside it; or `blocks`, modules or their names in the order in which
    each is called with the result of the one before.

    PipelineError if the model is no such chain, or if parameters are in no block.
    """
    if blocks is None:
        if type(model).forward is not nn.Sequential.forward or _must_stay_whole(model):
            lists = [name for name, each in model.named_modules() if isinstance(each, nn.Sequential | nn.ModuleList)]
            raise PipelineError(
                f"{type(model).__name__} is no plain nn.Sequential: name the blocks in the order in which each is "
                "called with the result of the one before"
                + (f"; there are lists in {', '.join(lists)}" if lists else "")
            )
        names = list(_flatten_sequential(model, ""))
    else:
        paths = {id(module): name for name, module in model.named_modules()}
        names = [block if isinstance(block, str) else paths.get(id(block), "") for block in blocks]
    known = dict(model.named_modules())
    for name in names:
        if not name or name not in known:
            raise PipelineError(f"block {name!r} is no module of the model: take names of model.named_modules()")
    inside = {id(each) for name in names for each in known[name].parameters()}
    outside = [name for name, each in model.named_parameters() if id(each) not in inside]
    if outside:
        raise PipelineError(
            f"parameters outside all blocks would not be trained: {', '.join(outside[:5])}; put their modules into "
            "blocks"
        )
    parameters = inspect.signature(known[names[0]].forward).parameters.values()
    own = inspect.signature(model.forward).parameters.values() if blocks is None else parameters
    arguments = tuple(each.name for each in own if each.default is each.empty and each.kind is not each.VAR_KEYWORD)
    return Tree(model, tuple(names), arguments, reason)


def _flatten_sequential(module: nn.Module, path: str) -> Iterator[str]:
    for name, child in module.named_children():
        below = f"{path}.{name}" if path else name
        if type(child).forward is nn.Sequential.forward and not _must_stay_whole(child):
            yield from _flatten_sequential(child, below)
        else:
            yield below


def _must_stay_whole(module: nn.Module) -> bool:
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks
    return any(hooks) or is_compiled(module)


def _bind_reference(ref: Ref) -> Maker:
    match ref:
        case ValueRef(index):
            return lambda frame: frame.values[index]
        case Argument(name):
            return lambda frame: frame.arguments[name]
        case _:
            raise AssertionError(ref)
