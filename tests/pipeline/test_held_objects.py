"""Objects that modules hold, as configurations: what a forward reads of them is heard, and they stay what they were."""

from __future__ import annotations

import enum
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from everstep.pipeline.errors import PipelineError  # noqa: E402
from everstep.pipeline.frontend.attributes import FixedAttributes  # noqa: E402
from everstep.pipeline.frontend.trace import trace_model  # noqa: E402

pytestmark = pytest.mark.torch

Code = Callable[[Any, Any], Any]


class Kind(enum.Enum):
    ONE = 1
    TWO = 2


class Config:
    def __init__(self, **values: Any) -> None:
        vars(self).update(values)


class Slotted:
    __slots__ = ("act",)

    def __init__(self, act: Any) -> None:
        self.act = act


class OfItsClass:
    act = torch.tanh

    def scale(self, x: Any) -> Any:
        return x * 2


class Halved:
    """A value that another one stands for in the object, under its own name."""

    def __get__(self, held: Any, kind: Any = None) -> Any:
        return vars(held)["scale"] / 2

    def __set__(self, held: Any, value: float) -> None:
        vars(held)["scale"] = value


class HalvedConfig(Config):
    scale = Halved()


class Items(dict[str, Any]):
    """A dictionary that has attributes beside its items."""


class Annealer:
    factor = 1.0

    def value(self) -> float:
        return self.factor

    def __call__(self, x: Any) -> Any:
        return x * self.factor


class Answering(type):
    """A metaclass with a method of the name of an object's."""

    def __getattr__(cls, name: str) -> Any:
        raise AttributeError(name)


class Answered(metaclass=Answering):
    pass


class HalfClosed(type):
    def __setattr__(cls, name: str, value: Any) -> None:
        if name == "__getattr__":
            raise TypeError(name)
        super().__setattr__(name, value)


class HalfClosedConfig(metaclass=HalfClosed):
    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


class OnlyWithin:
    """A value that there is in a forward only."""

    active: float | None = None

    @property
    def current(self) -> float:
        if self.active is None:
            raise RuntimeError("outside of a forward")
        return self.active


class Model(torch.nn.Module):  # type: ignore[misc, name-defined]  # torch is not where types are checked
    shared = Config(scale=1.0)

    def __init__(self, code: Code, config: Any) -> None:
        super().__init__()
        self.one, self.two = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.code, self.config = code, config

    def forward(self, x: Any) -> Any:
        return self.two(self.code(self, self.one(x)))


def trace(code: Code, config: Any) -> tuple[Model, FixedAttributes]:
    model = Model(code, config)
    fixed = FixedAttributes(model, trace_model(model, torch.ones(4, 4)).attributes)
    fixed.check()
    return model, fixed


def test_what_an_object_holds_is_part_of_the_trace() -> None:
    cases: list[tuple[Code, Config, Callable[[Any], object]]] = [
        (lambda model, x: x * model.config.kind.value, Config(kind=Kind.ONE), lambda c: setattr(c, "kind", Kind.TWO)),
        (lambda model, x: model.config.act(x), Config(act=torch.tanh), lambda c: setattr(c, "act", torch.sigmoid)),
        (lambda model, x: x * model.config.a, Config(a=torch.ones(4)), lambda c: setattr(c, "a", torch.zeros(4))),
        (lambda model, x: x * getattr(model.config, "a", 1.0), Config(), lambda c: setattr(c, "a", 2.0)),
        (lambda model, x: x * model.config.a[0].b, Config(a=[Config(b=1.0)]), lambda c: setattr(c.a[0], "b", 2.0)),
        (lambda model, x: x * model.shared.scale, Config(), lambda c: setattr(Model.shared, "scale", 2.0)),
    ]
    for code, config, change in cases:
        model, fixed = trace(code, config)
        change(model.config)
        with pytest.raises(PipelineError, match="has another attribute"):
            fixed.check()


def hold_deep(config: Any, times: int) -> Any:
    return Config(a=hold_deep(config, times - 1)) if times else config


def find_deep(config: Any) -> Any:
    return find_deep(config.a) if "a" in vars(config) else config


def annealed() -> Annealer:
    return Annealer()


def test_objects_of_any_kind_and_what_calls_them_are_part_of_the_trace() -> None:
    hidden, annealer, items = torch.nn.GELU(), annealed(), Items()
    items.scale = 1.0  # type: ignore[attr-defined]
    cases: list[tuple[Code, Any, Callable[[Any], object]]] = [
        (lambda model, x: model.config.act(x), Slotted(torch.tanh), lambda c: setattr(c, "act", torch.sigmoid)),
        (lambda model, x: model.config.act(x), OfItsClass(), lambda c: setattr(c, "act", torch.sigmoid)),
        (lambda model, x: model.config.scale(x), OfItsClass(), lambda c: setattr(c, "scale", lambda x: x * 3)),
        (lambda model, x: x * model.config.scale, HalvedConfig(scale=1.0), lambda c: setattr(c, "scale", 2.0)),
        (lambda model, x: x * model.config.scale, items, lambda c: setattr(c, "scale", 2.0)),
        (lambda model, x: x * model.config[3].b, {3: Config(b=1.0)}, lambda c: setattr(c[3], "b", 2.0)),
        (lambda model, x: x * model.config["items"].b, {"items": Config(b=1.0)}, lambda c: setattr(c["items"], "b", 2)),
        (lambda model, x: x * next(iter(model.config)).b, {Config(b=1.0)}, lambda c: setattr(next(iter(c)), "b", 2.0)),
        (
            lambda model, x: x * find_deep(model.config).b,
            hold_deep(Config(b=1.0), 9),
            lambda c: setattr(find_deep(c), "b", 2.0),
        ),
        (lambda model, x: x * model.config(), annealer.value, lambda c: setattr(annealer, "factor", 2.0)),
        (lambda model, x: model.config(x), partial(annealer), lambda c: setattr(annealer, "factor", 3.0)),
        (lambda model, x: model.config[0](x), [hidden], lambda c: setattr(hidden, "approximate", "tanh")),
    ]
    for code, config, change in cases:
        model, fixed = trace(code, config)
        change(model.config)
        with pytest.raises(PipelineError, match="has another attribute"):
            fixed.check()


def test_what_a_forward_keeps_in_slots_is_that_of_real_calls() -> None:
    def code(model: Any, x: Any) -> Any:
        model.config.act = x * 2
        return model.config.act

    model, _ = trace(code, Slotted(None))
    assert model.config.act is None


def test_what_a_forward_writes_into_an_object_is_none_of_the_script() -> None:
    def code(model: Any, x: Any) -> Any:
        model.config.scale = 3.0
        model.config.last = x * model.config.scale
        return model.config.last

    model, fixed = trace(code, Config(scale=1.0))
    model.config.scale, model.config.last = 5.0, None
    fixed.check()


def test_odd_classes_are_read_and_stay_as_they_were() -> None:
    for config in (Answered(), HalfClosedConfig()):
        before = dict(vars(type(config)))
        trace(lambda model, x: x * getattr(model.config, "scale", 1.0), config)
        assert dict(vars(type(config))) == before


def test_a_property_that_fails_outside_of_a_forward() -> None:
    def code(model: Any, x: Any) -> Any:
        model.config.active = 2.0
        x = x * model.config.current
        model.config.active = None
        return x

    trace(code, OnlyWithin())


def test_objects_and_lists_that_hold_themselves() -> None:
    loop, items = SimpleNamespace(scale=2.0), list[Any]()
    loop.me = loop
    items.append(items)
    trace(lambda model, x: x * model.config.scale, loop)
    trace(lambda model, x: x * len(model.config), items)


def test_tables_in_objects_are_those_of_real_calls() -> None:
    def code(model: Any, x: Any) -> Any:
        if model.config.table is None:
            model.config.table = torch.ones(4)
        model.config.tables.setdefault(4, torch.ones(4))
        return x * model.config.table * model.config.tables[4]

    model, _ = trace(code, Config(table=None, tables={}))
    assert vars(model.config) == {"table": None, "tables": {}}
