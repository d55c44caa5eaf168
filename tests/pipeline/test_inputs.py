"""Tensors of a batch are those of each step and micro-batch, in whatever they are handed over; else it is refused."""

from __future__ import annotations

import collections
import dataclasses
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils import _pytree as pytree  # noqa: E402

from everstep.pipeline.errors import PipelineError  # noqa: E402
from everstep.pipeline.frontend.arguments import Arguments, refuse_uncut_targets  # noqa: E402
from everstep.pipeline.frontend.check import run_stages  # noqa: E402
from everstep.pipeline.frontend.split import split_model  # noqa: E402
from everstep.pipeline.frontend.trace import trace_model  # noqa: E402

pytestmark = pytest.mark.torch


class Pair(NamedTuple):
    scale: Any
    shift: Any


@dataclasses.dataclass
class Fields:
    scale: Any
    shift: Any = None


@dataclasses.dataclass
class Setting:
    power: int


class Slotted:
    __slots__ = ("scale", "shift")

    def __init__(self, scale: Any, shift: Any) -> None:
        self.scale, self.shift = scale, shift


class Inherited(Slotted):
    __slots__ = ()


class Attributes(dict[str, Any]):
    """A dictionary that has an attribute of any name."""

    __getattr__ = dict.get


@dataclasses.dataclass
class Registered:
    scale: Any
    shift: Any = None


pytree.register_pytree_node(
    Registered, lambda each: ([each.scale, each.shift], None), lambda parts, _: Registered(*parts)
)


class Model(nn.Module):  # type: ignore[misc]  # torch is not where types are checked
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Any, extra: Any, setting: Any = None) -> Any:
        return self.two(self.one(x) * extra.scale + extra.shift) ** (1 if setting is None else setting.power)


def test_a_named_tuple_is_of_each_batch() -> None:
    model = Model()
    stages = split_model(
        trace_model(model, {"x": torch.ones(3, 4), "extra": Pair(torch.ones(3, 4), torch.ones(3, 1))}), {"two": 1}
    )
    other = {"x": torch.ones(2, 4), "extra": Pair(torch.randn(2, 4), torch.randn(2, 1))}
    assert torch.equal(run_stages(stages, other), model(**other))


@pytest.mark.parametrize(
    ("extra", "kind"),
    [
        (Fields(torch.ones(4)), "Fields"),
        (Slotted(torch.ones(4), None), "Slotted"),
        (Inherited(torch.ones(4), None), "Inherited"),
        (Registered(torch.ones(4)), "Registered"),
        (collections.deque([torch.ones(4)]), "deque"),
        (Attributes(scale=torch.ones(4)), "Attributes"),
        (collections.UserDict(scale=torch.ones(4)), "UserDict"),
        ({"of": [Fields(shift={"first": torch.ones(4)}, scale=1.0)]}, "Fields"),
        (Fields(torch.ones(4).numpy()), "Fields"),
        (torch.ones(4).numpy(), "ndarray"),
    ],
)
def test_tensors_in_an_object_are_refused_with_what_to_do(extra: Any, kind: str) -> None:
    with pytest.raises(PipelineError, match=rf"'extra' has a {kind}, which holds tensors or arrays: .* dictionaries"):
        trace_model(Model(), {"x": torch.ones(3, 4), "extra": extra})


def test_an_object_without_tensors_is_part_of_the_trace() -> None:
    given = {"x": torch.ones(3, 4), "extra": Pair(torch.ones(3, 4), torch.ones(3, 1)), "setting": Setting(2)}
    arguments = Arguments(Model())
    arguments.traced_with(arguments.name(given))
    arguments.check(arguments.name({**given, "setting": Setting(2)}))
    with pytest.raises(PipelineError, match="'setting' is another Setting than in the example"):
        arguments.check(arguments.name({**given, "setting": Setting(3)}))


@dataclasses.dataclass
class Chosen:
    power: int


class Choosing(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Any, setting: Any = None, **more: Any) -> Any:
        return self.layer(x * setting.power * more.get("scale", 1.0))


@pytest.mark.parametrize("setting", [Chosen(2), SimpleNamespace(power=2)])
def test_an_object_among_the_arguments_that_a_script_changes_in_place_is_seen(setting: Any) -> None:
    model = Choosing()
    arguments, given = Arguments(model), {"x": torch.ones(3, 4), "setting": setting}
    found = trace_model(model, given)
    arguments.traced_with(arguments.name(given), read=found.given)
    arguments.check(given)
    setting.power = 3
    with pytest.raises(PipelineError, match="argument 'setting' is another"):
        arguments.check(given)


def test_a_set_among_the_arguments_that_a_script_changes_in_place_is_seen() -> None:
    arguments, names = Arguments(Model()), {"one"}
    arguments.traced_with({"x": torch.ones(3, 4), "setting": names})
    arguments.check({"x": torch.ones(3, 4), "setting": {"one"}})
    names.add("two")
    with pytest.raises(PipelineError, match="'setting' is another set"):
        arguments.check({"x": torch.ones(3, 4), "setting": names})


def test_a_number_that_is_left_out_later_is_seen_by_the_process_with_the_first_stage() -> None:
    arguments, x = Arguments(Choosing()), torch.ones(3, 4)
    arguments.traced_with({"x": x, "scale": 2.0})
    arguments.check({"x": x})  # another process, which may not read it
    for given in ({"x": x}, {"x": x, "scale": None}):
        with pytest.raises(PipelineError, match=r"'scale' is None or not there, and was 2\.0"):
            arguments.check(given, is_first=True)


def test_two_tensors_of_one_argument_in_the_same_memory_are_refused_where_forward_changes_one() -> None:
    arguments, x = Arguments(Model()), torch.ones(3, 4)
    arguments.traced_with({"x": x, "extra": [x, x + 1]}, changed=["extra"])
    arguments.check({"x": x, "extra": [x + 1, x + 2]})
    with pytest.raises(PipelineError, match="'extra' in place, and another one in it is in the same memory"):
        arguments.check({"x": x, "extra": [x[:, :3], x[:, 2:]]})


def test_a_dictionary_that_has_any_attribute_is_part_of_the_trace() -> None:
    arguments = Arguments(Model())
    given = {"x": torch.ones(3, 4), "extra": torch.ones(3, 4), "setting": Attributes(power=2)}
    arguments.traced_with(arguments.name(given))
    arguments.check(arguments.name({**given, "setting": Attributes(power=2)}))
    with pytest.raises(PipelineError, match="'setting' is another Attributes than in the example"):
        arguments.check(arguments.name({**given, "setting": Attributes(power=3)}))


@pytest.mark.parametrize(
    ("targets", "words"),
    [
        (torch.ones(4, 1).numpy(), "have a ndarray"),
        (collections.UserDict(labels=torch.ones(4, 1)), "have a UserDict"),
        ({"labels": torch.ones(4), "more": [Fields(scale=torch.ones(4))]}, "have a Fields"),
        ({"labels": torch.ones(4), "weights": [1.0, 2.0, 3.0, 4.0]}, "a list of 4 items of float"),
        (["a", "b", "c", "d"], "a list of 4 items of str"),
    ],
)
def test_targets_that_would_go_whole_to_each_micro_batch_are_refused(targets: Any, words: str) -> None:
    with pytest.raises(PipelineError, match=words):
        refuse_uncut_targets(targets, 4)


def test_targets_that_are_cut_or_are_of_no_sample_are_taken() -> None:
    for targets in (
        torch.ones(4),
        {"labels": [torch.ones(4), torch.ones(4)], "weights": (1.0, 2.0, 3.0, 4.0), "names": ["a", "b"]},
        [torch.ones(4)] * 4,
        None,
    ):
        refuse_uncut_targets(targets, 4)
    refuse_uncut_targets([1.0], 1)


class ByPosition(Model):
    def forward(self, x: Any, shift: Any = None, /, *more: Any) -> Any:
        return self.two(self.one(x) + (0 if shift is None else shift) + sum(more))


@pytest.mark.parametrize("given", [1, 2, 4])
def test_arguments_that_have_no_names_for_callers_are_taken(given: int) -> None:
    model, batch = ByPosition(), tuple(torch.randn(3, 4) for _ in range(given))
    named = Arguments(model).name(batch)
    stages = split_model(trace_model(model, named), {"two": 1})
    assert torch.equal(run_stages(stages, named), model(*batch))
    assert Arguments(model).fits_by_name(named)


def test_targets_in_the_memory_of_an_argument_that_forward_changes_are_refused() -> None:
    arguments, batch = Arguments(Model()), torch.ones(3, 4)
    given = {"x": batch, "extra": Pair(torch.ones(3, 4), torch.ones(3, 1))}
    arguments.traced_with(given)
    arguments.refuse_changed_targets(given, batch)
    arguments.traced_with(given, {"x"})
    for targets in (batch.clone(), {"y": given["extra"].scale}, None, torch.ones(0)):
        arguments.refuse_changed_targets(given, targets)
    arguments.refuse_changed_targets(None, batch)
    for targets in (batch, {"y": [batch[1:]]}):
        with pytest.raises(PipelineError, match=r"changes its argument 'x' in place.*clone\(\)"):
            arguments.refuse_changed_targets(given, targets)
