"""Define the record of what a model did with one example: a tree of module calls, and the operations between them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from everstep.pipeline.errors import PipelineError
from everstep.pipeline.frontend.attributes import AttributeRead, Key, Reader
from everstep.pipeline.frontend.refs import Ref, Template, ValueRef, iterate_references
from everstep.pipeline.frontend.sizes import Shape, Sizes, symbols_of

SizePlace = tuple[str, tuple[Any, ...], int]  # an argument, the path to a tensor in it, and a dimension of that


class Untraceable(PipelineError):
    """The model cannot be looked into; the message says where and why."""


FIXES_SAMPLES = "its code fixes the number of samples, by a loop over them, len() or int(): write x.shape[0] for len(x)"


FIXES_SIZES = "it takes a size for a number"


class SizesFixed(BaseException):
    """A module's own code has fixed the number of samples, or a size before it turned out to be opaque, which then is
    none of the code around it: it must be opaque from the beginning."""

    def __init__(self, path: str, reason: str = FIXES_SAMPLES) -> None:
        super().__init__(path)
        self.path, self.reason = path, reason


class GuessFailed(BaseException):
    """A module's own code has failed with a size that was guessed within it, and may rely on its being that of an
    argument."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path


@dataclass(eq=False)
class Op:
    """One call of a function of torch, or of a custom autograd function.

    `at`: its place in time; `touches`, `mutates`: the memory it used, and changed; `draws`: random numbers; `seeded`:
    whether it is of a kind that draws some, which attention without dropout does not;
    `grad`: whether autograd was on; `autocast`: (device type, dtype, enabled) if the model itself had set it.
    """

    name: str
    func: Any
    at: int
    owner: Call
    inputs: Template  # (args, kwargs)
    outputs: Template = None
    touches: frozenset[int] = frozenset()
    mutates: frozenset[int] = frozenset()
    draws: bool = False
    seeded: bool = False
    grad: bool = True
    autocast: tuple[str, Any, bool] | None = None
    stage: int | None = None
    other: Template = None  # `inputs` if the owner's training flag is the other one, where they differ


@dataclass(eq=False)
class Call:
    """One call of a module. `inputs` and `outputs` are None if they hold what cannot be handed on.

    `whole`: why it is never cut; `opaque`: why nobody could look into it, then `body` is empty. `grad`, `autocast`:
    what is around it, as in Op.
    """

    path: str
    repeat: int
    module: Any
    at: int
    training: bool
    owner: Call | None = None  # the call inside which it is
    inputs: Template = None
    outputs: Template = None
    body: list[Op | Call] = field(default_factory=list)
    whole: str = ""
    opaque: str = ""
    touches: frozenset[int] = frozenset()
    mutates: frozenset[int] = frozenset()
    grad: bool = True
    autocast: tuple[str, Any, bool] | None = None
    stage: int | None = None
    conditions: list[Any] = field(default_factory=list)  # what its own code had to assume of sizes
    other: Template = None  # as in Op
    other_outputs: Template = None  # `outputs` if the training flag is the other one, where numbers in it differ
    weights: tuple[str, ...] = ()  # of an opaque call
    writes: tuple[str, ...] = ()  # those of them that it changes, by their names in the module
    varies: bool = False  # whether the shapes of what an opaque call gives may depend on data
    changes: frozenset[int] = frozenset()  # the tensors that it is given and changes in place, by their places
    is_lent: bool = False  # whether it ran with parameters of others, as by torch.func.functional_call
    fixes: bool = False  # whether a size has become a number, or another size, in it

    @property
    def name(self) -> str:
        return f"{self.path}@{self.repeat}" if self.repeat else self.path

    def calls(self) -> Iterator[Call]:
        """The calls directly inside."""
        return (item for item in self.body if isinstance(item, Call))

    def ops(self) -> Iterator[Op]:
        """All operations inside, in time."""
        for item in self.body:
            if isinstance(item, Op):
                yield item
            else:
                yield from item.ops()

    def all_calls(self) -> Iterator[Call]:
        """This call and all inside."""
        yield self
        for call in self.calls():
            yield from call.all_calls()


def iterate_parts(item: Op | Call | None) -> Iterator[Op | Call]:
    """The operations and opaque calls of which an item consists, in time."""
    if isinstance(item, Op) or (item is not None and item.opaque):
        yield item
    elif item is not None:
        for each in item.body:
            yield from iterate_parts(each)


def iterate_made_values(item: Op | Call) -> Iterator[int]:
    """The values that an operation or an opaque call made."""
    return (ref.index for ref in iterate_references(item.outputs) if isinstance(ref, ValueRef))


@dataclass(frozen=True)
class TensorInfo:
    """The known properties of a tensor; `shape` holds sizes that are expressions."""

    shape: Shape
    dtype: Any
    gradient: bool


@dataclass(eq=False)
class ForwardRecord:
    """The record of one forward.

    Attributes:
        device: The device of the example.
        weights: The weights that were there before, by name.
        constants: The other tensors that were there before.
        aliases: Of those that share memory with a parameter, its name.
        arguments: For each argument of the model, the tensors in it by their paths.
    """

    root: Call
    sizes: Sizes
    device: Any
    values: list[TensorInfo] = field(default_factory=list)
    unchanged: dict[int, Ref] = field(default_factory=dict)  # values that are tensors from before, and what they were
    weights: dict[str, Any] = field(default_factory=dict)
    constants: list[Any] = field(default_factory=list)
    aliases: dict[int, str] = field(default_factory=dict)
    arguments: dict[str, dict[tuple[Any, ...], TensorInfo]] = field(default_factory=dict)
    odd: str = ""  # what the model returns that cannot be followed
    given: dict[int, str] = field(default_factory=dict)  # memory of the arguments, and which it is
    held: dict[int, str] = field(default_factory=dict)  # the same of weights
    laid_out: set[str] = field(default_factory=set)  # arguments of which code asks how they lie in memory
    replaced: set[str] = field(default_factory=set)  # buffers in whose place another tensor is put
    lasting: set[int] = field(default_factory=set)  # memory that was there before
    symbols: dict[Any, SizePlace] = field(default_factory=dict)  # where each size of the arguments is
    made: dict[Any, list[tuple[int, int]]] = field(default_factory=dict)  # values and dimensions of `sizes.made`
    reads: dict[Key, AttributeRead] = field(default_factory=dict)  # attributes of modules
    given_reads: dict[str, AttributeRead] = field(default_factory=dict)  # the same of objects among the arguments
    left: set[Key] = field(default_factory=set)  # attributes that hold something else afterwards
    modes: dict[Reader, AttributeRead] = field(default_factory=dict)  # training flags that others' code reads
    modes_after: dict[str, bool] = field(default_factory=dict)  # training flags that the forward leaves
    set_modes: set[str] = field(default_factory=set)  # the modules whose flags it has set

    def find_varying(self) -> set[int]:
        """Return the values whose shapes may depend on data: what such a call gives, and all that is made of that, or
        of its sizes alone, as a mask of the places in a text."""
        found, sizes = set[int](), set[Any]()
        for part in iterate_parts(self.root):
            made = set(iterate_made_values(part))
            given = (ref.index for ref in iterate_references(part.inputs) if isinstance(ref, ValueRef))
            if (isinstance(part, Call) and part.varies) or not found.isdisjoint(given):
                found |= made
                sizes |= self._find_made_sizes(made)
            else:
                found.update(index for index in made if not sizes.isdisjoint(self._find_made_sizes([index])))
        return found

    def _find_made_sizes(self, values: Iterable[int]) -> set[Any]:
        """Return the sizes of these values that only modules know."""
        return symbols_of(size for index in values for size in self.values[index].shape).intersection(self.sizes.made)

    def iterate_conditions(self) -> Iterator[Any]:
        """All that the code of modules had to assume of sizes."""
        for call in self.root.all_calls():
            yield from call.conditions
