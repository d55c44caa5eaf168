"""Weights of other stages: a process has copies of them, in the model that it gave, which do not follow the training.

Whoever reads such a copy would compute with what it was when `pipeline()` was called, and nothing would say so: a loss
that is scaled by the norm of an embedding, an average over `model.parameters()`, a state dictionary of the model. So
a copy says its shape and its type, and reading its values is an error with its name and where it is trained.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import new_class
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from everstep.pipeline.errors import PipelineError

_T: Any = torch.Tensor  # its types do not tell that properties can be set
_PROPERTIES = (
    "_backward_hooks",
    "_base",
    "_grad",
    "_post_accumulate_grad_hooks",
    "_version",
    "device",
    "dtype",
    "grad",
    "grad_fn",
    "is_cpu",
    "is_cuda",
    "is_leaf",
    "is_meta",
    "is_mps",
    "is_nested",
    "is_quantized",
    "is_sparse",
    "is_sparse_csr",
    "is_xpu",
    "itemsize",
    "layout",
    "nbytes",
    "ndim",
    "output_nr",
    "requires_grad",
    "retains_grad",
    "shape",
)
_METHODS = (
    "__len__",
    "data_ptr",
    "dim",
    "element_size",
    "get_device",
    "is_complex",
    "is_contiguous",
    "is_floating_point",
    "is_inference",
    "is_pinned",
    "is_shared",
    "is_signed",
    "ndimension",
    "nelement",
    "numel",
    "register_hook",
    "register_post_accumulate_grad_hook",
    "requires_grad_",
    "size",
    "storage_offset",
    "stride",
    "untyped_storage",
)
# Of a tensor as a thing, and not of its values: they are as they were.
DESCRIBING = frozenset(
    [
        *(getattr(_T, name).__get__ for name in _PROPERTIES if hasattr(_T, name)),
        *(getattr(_T, name) for name in _METHODS),
        *(getattr(_T, name).__set__ for name in ("grad", "requires_grad", "_backward_hooks")),
        torch.is_complex,
        torch.is_floating_point,
        torch.numel,
    ]
)
_FILLING = frozenset([_T.copy_, _T.data.__set__])  # all of a tensor gets other values


class PipelineOpen:
    """Tells of one pipeline whether it goes on to train the weights of its stages."""

    def __init__(self) -> None:
        self.is_open = True


@dataclass(frozen=True)
class TrainedElsewhere:
    """The place of a weight that another process trains.

    Attributes:
        kind: `parameter` or `buffer`.
        name: Its name in the model.
        stages: The stages that have it, which are on `ranks` of the pipeline.
        pipeline: Which trains it.
    """

    kind: str
    name: str
    stages: tuple[int, ...]
    ranks: tuple[int, ...]
    pipeline: PipelineOpen = field(default_factory=PipelineOpen)

    def __str__(self) -> str:
        stages, ranks = (", ".join(map(str, each)) for each in (self.stages, self.ranks))
        return f"{self.kind} {self.name!r} (of stage {stages}, on rank {ranks} of the pipeline)"


_places: Any = WeakIdKeyDictionary()
_classes: dict[type, type] = {}


class ForeignTensor:
    """A weight of another stage, beside the class that it had: its values are not to be read."""

    plain: type
    is_trained_elsewhere = True  # for checkpoints, which know nothing of pipelines

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call what does not depend on values, and refuse all else."""
        kwargs = kwargs or {}
        read = _list_foreign((args, kwargs))
        if func in _FILLING and args and isinstance(args[0], ForeignTensor):
            read = _list_foreign((args[1:], kwargs))
            # As from a checkpoint. While the pipeline trains, the next step makes these values stale again.
            if not read and not _places[args[0]].pipeline.is_open:
                unmark_foreign(args[0])
        if func in DESCRIBING or not read:
            return _call_plainly(func, args, kwargs)
        raise make_foreign_error([_places[each] for each in read], _name_function(func))

    def __repr__(self) -> str:
        """Describe where it is trained, without its values."""
        return f"<{_places[self]}>"

    def __deepcopy__(self, memo: Any) -> Any:
        """Refuse a copy, as for an average of all weights."""
        raise make_foreign_error([_places[self]], "deepcopy")

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be saved, as by torch.save(model)."""
        raise make_foreign_error([_places[self]], "saving")


def mark_foreign(
    tensors: Mapping[str, tuple[str, Any]],
    stages: Mapping[str, tuple[int, ...]],
    placement: Iterable[int],
    pipeline: PipelineOpen,
) -> None:
    """Mark weights as those of other processes.

    Args:
        tensors: The kind and the tensor, by the name in the model.
        stages: The stages that have each of them.
        placement: The rank of each stage.
        pipeline: Which trains them.
    """
    ranks = list(placement)
    for name, (kind, tensor) in tensors.items():
        if isinstance(tensor, ForeignTensor):
            unmark_foreign(tensor)
        where = stages.get(name, ())
        place = TrainedElsewhere(kind, name, where, tuple(sorted({ranks[each] for each in where})), pipeline)
        with contextlib.suppress(TypeError):  # of a class of its own, whose objects can have no other
            tensor.__class__ = _make_foreign_class(type(tensor))
            _places[tensor] = place


def unmark_foreign(tensor: Any) -> None:
    """Let a weight be read again."""
    tensor.__class__ = tensor.plain
    del _places[tensor]


def find_foreign(tensors: Iterable[Any]) -> dict[int, TrainedElsewhere]:
    """Return where the foreign ones among some tensors are trained, by the address of their memory."""
    marked = [each for each in tensors if each in _places]
    found = [(each.untyped_storage().data_ptr(), _places[each]) for each in marked]
    return {address: place for address, place in found if address}


class WeightReads(TorchFunctionMode):  # type: ignore[misc]  # torch is not where types are checked
    """Looks inside for operations on some memory, by whatever tensor they reach it, as by a view that was made before.

    Args:
        known: What to call the memory, by its address.

    Attributes:
        found: What of it was used, by the address.
        draws: Whether a generator was given to an operation.
    """

    def __init__(self, known: Mapping[int, Any]) -> None:
        super().__init__()
        self._known = known
        self.found: dict[int, Any] = {}
        self.draws = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function, and note what it is given."""
        kwargs = kwargs or {}
        self.draws = self.draws or kwargs.get("generator") is not None
        for each in pytree.tree_leaves((args, kwargs)) if func not in DESCRIBING else ():
            if isinstance(each, torch.Tensor) and each.layout is torch.strided:
                with torch._C.DisableTorchFunctionSubclass():
                    address = each.untyped_storage().data_ptr()
                if address in self._known:
                    self.found[address] = self._known[address]
        return func(*args, **kwargs)


@contextlib.contextmanager
def lend_foreign(model: nn.Module) -> Iterator[None]:
    """Let all weights of a model be read inside, where what follows from them trains nothing.

    After an error they are again what they were. Else they are plain, unless they were marked inside.
    """
    lent = [(each, _places[each]) for each in _list_tensors(model) if isinstance(each, ForeignTensor)]
    for tensor, _ in lent:
        unmark_foreign(tensor)
    try:
        yield
    except BaseException:
        take_back(lent)
        raise


@contextlib.contextmanager
def read_foreign(model: nn.Module) -> Iterator[None]:
    """Let all weights of a model be read inside, and be afterwards what they were."""
    lent = [(each, _places[each]) for each in _list_tensors(model) if isinstance(each, ForeignTensor)]
    with lend_foreign(model):
        yield
    take_back(lent)


def take_back(lent: Iterable[tuple[Any, TrainedElsewhere]]) -> None:
    """Mark what was lent as it was before."""
    for tensor, place in lent:
        if not isinstance(tensor, ForeignTensor):
            tensor.__class__ = _make_foreign_class(type(tensor))
            _places[tensor] = place


def make_foreign_error(places: Iterable[TrainedElsewhere], what: str) -> PipelineError:
    """Return the error for reading weights that are trained elsewhere; `what` reads them."""
    first, *others = dict.fromkeys(places)
    more = f" and {len(others)} more" if others else ""
    return PipelineError(
        f"{what} reads {first}{more}, of which this process has a copy only that does not follow the training. A loss "
        "gets what it needs from the model: let forward return it beside its result, as "
        "{'logits': …, 'norm': self.embed.weight.norm()}; code of the model that no trace follows (modules that depend "
        "on data, hooks on tensors, functions of autograd) gets it as an argument. For averages, statistics and saving "
        "take run.named_parameters(), which are this process's, to evaluate run.evaluate(…); for the whole model, load "
        "a checkpoint into one that is built anew; what is of use before training, as a copy for an average, take "
        "before pipeline() is called, since from then on copies do not follow what is loaded or broadcast either"
    )


def _make_foreign_class(kind: type) -> type:
    if kind not in _classes:
        name, bases = f"Foreign{kind.__name__}", (ForeignTensor, kind)
        _classes[kind] = new_class(name, bases, exec_body=lambda body: body.update(plain=kind))
    return _classes[kind]


def _list_tensors(model: nn.Module) -> Iterator[Any]:
    yield from model.parameters()
    yield from model.buffers()


def _list_foreign(structure: Any) -> list[Any]:
    return [each for each in pytree.tree_leaves(structure) if isinstance(each, ForeignTensor)]


def _call_plainly(func: Any, args: Any, kwargs: Any) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _name_function(func: Any) -> str:
    name = getattr(func, "__name__", type(func).__name__)
    if name in ("__get__", "__set__"):
        name = getattr(func.__self__, "__name__", name)
    return f"{name.strip('_')}()"
