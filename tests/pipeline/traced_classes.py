"""One small model for each row of the table of what a trace takes from its example and from its moment.

Each uses its own class of things, which change between the steps: `reference/pipeline-rules.md` says what becomes of
them.
"""

from __future__ import annotations

import argparse
import functools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

STEPS = 3
CHANGED = 1  # the step in which something changes
Code = Callable[..., Any]  # of a module and what it is given


@dataclass(frozen=True)
class Case:
    """A model, what it is given in each step, and what a script changes before a step. `micro`: micro-batches."""

    build: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    change: Callable[[int, nn.Module], object] = lambda step, model: None
    micro: int = 2


def make(step: int, *shape: int, scale: float = 1.0) -> Any:
    generator = torch.Generator().manual_seed(step + 1)
    return scale * torch.randn(*(shape or (4, 5, 4)), generator=generator, dtype=torch.float64)


class Opened(nn.Module):  # type: ignore[misc]  # torch is not where types are checked
    """Code of a model's own between two layers, which a cut opens."""

    def __init__(self, code: Code, **held: Any) -> None:
        super().__init__()
        self.one, self.two, self.code = nn.Linear(4, 4), nn.Linear(4, 4), code
        for name, value in held.items():
            setattr(self, name, value)
        self.double()

    def forward(self, x: Any) -> Any:
        return self.two(self.code(self, self.one(x)))


class Inner(nn.Module):  # type: ignore[misc]
    """A module without others, which no cut opens."""

    def __init__(self, code: Code, **held: Any) -> None:
        super().__init__()
        self.code = code
        for name, value in held.items():
            setattr(self, name, value)

    def forward(self, *given: Any) -> Any:
        return self.code(self, *given)


class Given(nn.Module):  # type: ignore[misc]
    """Two layers behind code that goes by the arguments, in one dictionary."""

    def __init__(self, code: Callable[..., Any]) -> None:
        super().__init__()
        self.one, self.two, self.code = nn.Linear(4, 4), nn.Linear(4, 4), code
        self.double()

    def forward(self, x: Any, other: Any = None, **more: Any) -> Any:
        return self.two(self.one(self.code(x, other, more)).tanh())


def around(code: Code, after: Callable[..., Any] = lambda model, x: x, **held: Any) -> nn.Module:
    """A module that no cut opens, between two layers, and code of the model's own after it."""
    return Opened(lambda model, x: after(model, model.inner(x)), inner=Inner(code, **held))


def case(build: Callable[[], nn.Module], batch: Any = None, change: Any = None, micro: int = 2) -> Case:
    def once(step: int, model: nn.Module) -> None:
        if change is not None and step == CHANGED:
            change(model)

    return Case(build, batch or (lambda step: {"x": make(step)}), once, micro)


def given(code: Callable[..., Any], before: Any, after: Any) -> Case:
    """The other argument is another one from the second step on."""
    return case(lambda: Given(code), lambda step: {"x": make(step), "other": (after if step else before)(step)})


def attribute(code: Code, change: Any, **held: Any) -> Case:
    return case(lambda: Opened(code, **{name: value() for name, value in held.items()}), change=change)


def lengths(build: Callable[[], nn.Module]) -> Case:
    return case(build, lambda step: {"x": make(step, 4, (5, 7, 3)[step], 4)})


def by_data(build: Callable[[], nn.Module]) -> Case:
    """The numbers become large, so that a module does something else than for the example."""
    return case(build, lambda step: {"x": make(step, scale=1000.0 if step else 1.0)})


def is_large(x: Any) -> bool:
    return bool(x.abs().max() > 50)


@functools.cache
def positions(count: int) -> Any:
    return torch.arange(count, dtype=torch.float64)


def setting_parent() -> nn.Module:
    model = Opened(lambda model, x: model.inner(x) * (3 if model.found else 1), found=False)
    held: Any = weakref.ref(model)

    def look(inner: Any, x: Any) -> Any:
        held().found = is_large(x)
        return x * 1.0

    model.inner = Inner(look)
    return model


def writing(x: Any, module: Any) -> Any:
    if is_large(x):
        module.mean.mul_(0.5)
    return x + module.mean


def buffered(code: Code) -> nn.Module:
    model = around(code)
    model.inner.register_buffer("mean", torch.ones(4, dtype=torch.float64))
    return model


def reading_flag() -> nn.Module:
    return Opened(lambda model, x: model.block(x) * (2 if model.block.training else 1), block=Opened(lambda _, x: x))


def frozen() -> nn.Module:
    model = Opened(lambda model, x: model.block(x), block=Opened(lambda block, x: x * (2 if block.training else 1)))
    model.block.eval()
    return model


def counting(model: Any, x: Any) -> Any:
    model.calls += 1
    return x * 2 if model.calls > 3 else x


def seeding(model: Any, x: Any) -> Any:
    return x + torch.randn(4, generator=torch.Generator().manual_seed(3), dtype=x.dtype)


def remembering(model: Any, x: Any) -> Any:
    before, model.state = model.state, x.detach().mean()
    return x if before is None else x + before


def filling(module: Any, x: Any, found: Any) -> Any:
    found.append(x.square())
    return x if is_large(x) else -x


def filled(model: Any, x: Any) -> Any:
    found: list[Any] = []
    x = model.inner(x, found)
    return x + sum(found)


def windows(x: Any, other: Any, more: Any) -> Any:
    size = (x.shape[0], x.shape[1] - 1, 2, x.shape[2])
    strides = (x.stride(0), x.stride(1), x.stride(1), x.stride(2))
    return x.as_strided(size, strides, x.storage_offset()).mean(2)


SCALES = {"global": 1.0}


def set_global(step: int, model: nn.Module) -> None:
    SCALES["global"] = 2.0 if step else 1.0


def with_closure() -> nn.Module:
    box = [1.0]
    model = Opened(lambda model, x: x * box[0])
    model.set_box = lambda value: box.__setitem__(0, value)
    return model


class OfClass(Opened):
    scale = 1.0


def set_class(step: int, model: nn.Module) -> None:
    OfClass.scale = 2.0 if step else 1.0


def same_tensor(step: int) -> Any:
    x = make(step)
    return {"x": x, "other": x if step else x.clone()}


def iterate_rows(x: Any) -> Iterator[Any]:
    yield from x.unbind(1)


FOLLOWED = {
    "numbers of arguments, buffers and parameters": case(
        lambda: buffered(lambda module, x: x * module.mean), change=lambda model: model.inner.mean.fill_(3.0)
    ),
    "sizes with which code computes": lengths(lambda: Opened(lambda model, x: x / x.shape[1])),
    "sizes that an operation takes for a number": lengths(
        lambda: Opened(lambda model, x: x * torch.linspace(0, 1, x.shape[1], dtype=x.dtype).square().mean())
    ),
    "sizes by which a module goes that is in one stage as a whole": lengths(
        lambda: around(lambda module, x: x * len([*iterate_rows(x)]))
    ),
    "numbers by which a module goes that is in one stage as a whole": by_data(
        lambda: around(lambda module, x: x * 2 if is_large(x) else x)
    ),
    "sizes that only a module knows": lengths(
        lambda: around(lambda module, x: (x if is_large(x) else -x)[:, ::2], lambda model, y: y / y.shape[1])
    ),
    "tables that functions and modules keep for each length": lengths(
        lambda: around(lambda module, x: x + positions(int(x.shape[1]))[:, None])
    ),
    "a tensor in an attribute, changed in place": attribute(
        lambda model, x: x * model.scale,
        lambda model: model.scale.fill_(3.0),
        scale=lambda: torch.ones(4, dtype=torch.float64),
    ),
    "the training flag of a module, in its own code": case(
        lambda: Opened(
            lambda model, x: model.block(x), block=Opened(lambda block, x: x * (2 if block.training else 1))
        ),
        change=lambda model: model.block.eval(),
    ),
    "the training flag of a module that the script had set to evaluation at the call": case(
        frozen, change=lambda model: model.block.train()
    ),
    "hooks on modules without modules in them": case(
        lambda: Opened(lambda model, x: x),
        change=lambda model: model.two.register_forward_hook(lambda module, args, output: output * 2),
    ),
    "tensors changed in place across a cut": case(lambda: Opened(lambda model, x: (x * 1.0).mul_(2.0).tanh_() + x)),
    "parameters that are frozen": case(
        lambda: Opened(lambda model, x: x.tanh()), change=lambda model: model.two.weight.requires_grad_(False)
    ),
}

CHECKED = {
    "the type of an argument": given(
        lambda x, other, more: x * (2 if other.dtype == torch.bool else 1), make, lambda step: make(step) > 0
    ),
    "the number of dimensions of an argument": case(
        lambda: Given(lambda x, other, more: x * 2 if x.dim() == 2 else x),
        lambda step: {"x": make(step, 4, 4) if not step else make(step)},
    ),
    "whether an argument is there": given(
        lambda x, other, more: x if other is None else x * 2, lambda step: torch.ones(4), lambda step: None
    ),
    "numbers, flags, texts and objects among arguments": given(
        lambda x, other, more: x * other, lambda step: 2.0, lambda step: 3.0
    ),
    "the keys of an argument, and their order": given(
        lambda x, other, more: functools.reduce(lambda one, two: one * 2 + two, other.values()),
        lambda step: {"a": make(step), "b": make(step + 1)},
        lambda step: {"b": make(step + 1), "a": make(step)},
    ),
    "the order of keywords that `forward` takes by `**`": case(
        lambda: Given(lambda x, other, more: functools.reduce(lambda one, two: one * 2 + two, more.values())),
        lambda step: {
            "x": make(step),
            **{name: make(step + ord(name)) for name in ("ba" if step else "ab")},
        },
    ),
    "how an argument lies in memory, where code asks": case(
        lambda: Given(windows), lambda step: {"x": make(step, 4, 4, 5).mT if step else make(step, 4, 5, 4)}
    ),
    "two arguments in the same memory, of which `forward` changes one": case(
        lambda: Given(lambda x, other, more: x.mul_(2.0) + other), same_tensor
    ),
    "sizes that code takes for a number": lengths(lambda: Opened(lambda model, x: x * int(x.shape[1]))),
    "sizes of which an operation makes others that are not found by trying": lengths(
        lambda: Opened(lambda model, x: x * (x @ x.mT).diagonal(x.shape[1] // 2, 1, 2).mean(1)[:, None, None])
    ),
    "a size in whose place an operation takes 1": case(
        lambda: Opened(lambda model, x: (x + torch.ones(5, 1, dtype=x.dtype)) / x.shape[1]),
        lambda step: {"x": make(step, 4, 1 if step else 5, 4)},
    ),
    "sizes by which code chooses": lengths(lambda: Opened(lambda model, x: x * (2 if x.shape[1] > 5 else 1))),
    "sizes that torch decides, with which code computes": lengths(
        lambda: Opened(lambda model, x: x[:, :6] / x[:, :6].shape[1])
    ),
    "plain attributes of modules": attribute(
        lambda model, x: x * model.scale, lambda model: setattr(model, "scale", 2.0), scale=lambda: 1.0
    ),
    "attributes that are not there": attribute(
        lambda model, x: x * getattr(model, "scale", 1.0), lambda model: setattr(model, "scale", 2.0)
    ),
    "attributes with the name of a method, as `type`": attribute(
        lambda model, x: x.tanh() if model.type == "tanh" else x,
        lambda model: setattr(model, "type", "linear"),
        type=lambda: "tanh",
    ),
    "arrays in attributes": attribute(
        lambda model, x: x * float(model.scale[0]),
        lambda model: model.scale.__setitem__(0, 2.0),
        scale=lambda: np.ones(2),
    ),
    "another tensor or function in an attribute": attribute(
        lambda model, x: model.act(x), lambda model: setattr(model, "act", torch.sigmoid), act=lambda: torch.tanh
    ),
    "attributes of objects that a module holds, as a configuration": attribute(
        lambda model, x: x * model.config.scale,
        lambda model: setattr(model.config, "scale", 2.0),
        config=lambda: argparse.Namespace(scale=1.0),
    ),
    "another module, parameter, buffer, hook or `forward`": case(
        lambda: Opened(lambda model, x: model.inner(x), inner=Inner(lambda module, x: x)),
        change=lambda model: setattr(model, "inner", Inner(lambda module, x: x * 2)),
    ),
    "the training flag of a module, in another one's code": case(reading_flag, change=lambda model: model.block.eval()),
    "the training flag of the model, where its own code calls something else by it": case(
        lambda: Opened(lambda model, x: x.tanh() if model.training else x), change=lambda model: model.eval()
    ),
    "numbers, flags and missing tensors that a module returns": by_data(
        lambda: around(lambda module, x: (x, 2 if is_large(x) else 1), lambda model, found: found[0] * found[1])
    ),
    "the type and the number of dimensions of what a module returns": by_data(
        lambda: around(
            lambda module, x: x.float() if is_large(x) else x * 1.0,
            lambda model, y: y.double() * (2 if y.dtype == torch.float32 else 1),
        )
    ),
    "attributes that a module or a hook sets in the modules around it": by_data(setting_parent),
    "tensors that a module changes in place for some data": by_data(
        lambda: Opened(
            lambda model, x: model.inner(x, y := x.detach() * 1.0) + y,
            inner=Inner(lambda module, x, y: x + (y.mul_(0.5) if is_large(x) else y).tanh()),
        )
    ),
    "memory that a module hands on for some data, and others change": by_data(
        lambda: Opened(
            lambda model, x: model.inner(x := x * 1.0).mul_(2.0) + x,
            inner=Inner(lambda module, x: x if is_large(x) else x * 1.0),
        )
    ),
    "buffers that a module writes for some data": by_data(lambda: buffered(lambda module, x: writing(x, module))),
}

REJECTED = {
    "the number of calls, counted in an attribute": attribute(counting, None, calls=lambda: 0),
    "what an earlier call has kept": attribute(remembering, None, state=lambda: None),
    "random numbers of Python or numpy in code that may be cut": attribute(
        lambda model, x: x * float(np.random.rand()), None
    ),
    "a generator that code seeds": attribute(seeding, None),
    "numbers by which the model's own code goes": attribute(lambda model, x: x * 2 if is_large(x) else x, None),
    "a list that a module fills by its data": case(lambda: Opened(filled, inner=Inner(filling))),
    "the gradient mode in code that a cut opens": attribute(
        lambda model, x: x * (1 if torch.is_grad_enabled() else 2), None
    ),
    "the Python type of a tensor": attribute(lambda model, x: x * (2 if type(x) is torch.Tensor else 3), None),
    "buffers that are written": case(lambda: buffered(lambda module, x: x + module.mean.mul_(0.5))),
    "gradients that the model's own code takes": attribute(
        lambda model, x: x + torch.autograd.grad(x.sum(), model.one.weight, create_graph=True)[0].sum(), None
    ),
}

NOT_SEEN = {
    "global variables": Case(
        lambda: Opened(lambda model, x: x * SCALES["global"]), lambda step: {"x": make(step)}, set_global
    ),
    "variables of a function around": case(with_closure, change=lambda model: model.set_box(2.0)),
    "attributes read by `type(self)` or `vars(self)`": Case(
        lambda: OfClass(lambda model, x: x * type(model).scale), lambda step: {"x": make(step)}, set_class
    ),
    "whether two arguments are one tensor (`is`)": case(
        lambda: Given(lambda x, other, more: x * 2 + other if x is other else x + other), same_tensor
    ),
    "the text of a size, as `str(x.shape[1])` or a key that is made of it": lengths(
        lambda: Opened(lambda model, x: x * (2 if f"{x.shape[1]}" == "7" else 1))
    ),
}

CLASSES = {
    "followed": FOLLOWED,
    "checked": CHECKED,
    "rejected": REJECTED,
    "not seen": NOT_SEEN,
}
