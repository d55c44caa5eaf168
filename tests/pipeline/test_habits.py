"""Models that do more than call modules: they keep values, change values in place, and branch."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from everstep.pipeline import EngineOptions, PlanOptions, pipeline  # noqa: E402
from everstep.pipeline.engine.nested import tensors_of  # noqa: E402
from everstep.pipeline.engine.stage import why_not_split  # noqa: E402
from everstep.pipeline.errors import PipelineError  # noqa: E402
from everstep.pipeline.frontend.arguments import Arguments  # noqa: E402
from everstep.pipeline.frontend.check import compare_gradients, run_stages  # noqa: E402
from everstep.pipeline.frontend.record import Untraceable  # noqa: E402
from everstep.pipeline.frontend.split import node_modules, split_model  # noqa: E402
from everstep.pipeline.frontend.trace import trace_model  # noqa: E402
from everstep.pipeline.profile import measure_graph  # noqa: E402
from tests.checkpoint import ranks  # noqa: E402
from tests.pipeline.grouping import group_options  # noqa: E402

pytestmark = pytest.mark.torch

X = {"x": torch.linspace(-1.0, 1.0, 12, dtype=torch.float64).view(3, 4)}


class Net(nn.Module):  # type: ignore[misc]  # torch is not where types are checked
    """Two layers, and a habit between them, in the model's own code or in a module's."""

    def __init__(self, habit: Callable[[Any, Any], Any], *, inside: bool = False) -> None:
        super().__init__()
        self.one, self.middle, self.two = nn.Linear(4, 4), Habit(habit), nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.table, self.seen, self.habit = None, list[Any](), None if inside else habit
        self.double()

    def forward(self, x: Any) -> Any:
        x = self.one(x)
        return self.two(self.middle(x) if self.habit is None else self.habit(self, x))


class Habit(nn.Module):  # type: ignore[misc]
    def __init__(self, habit: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.habit, self.inner = habit, nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Any) -> Any:
        return self.habit(self, x)


def squares(output: Any) -> Any:
    return output.square().sum()


def keeps(net: Any, x: Any) -> Any:
    if net.table is None:
        net.table = torch.arange(x.shape[1], dtype=x.dtype).cos()
    net.seen.append(x)
    net.last = x
    return x * net.table


def test_what_a_model_keeps_is_not_replaced_by_tensors_without_data() -> None:
    model = Net(keeps)
    stages = split_model(trace_model(model, X), {"two": 1})
    assert (model.table, model.seen, hasattr(model, "last")) == (None, [], False)
    assert torch.equal(run_stages(stages, X), model(**X))
    assert len(model.seen) == 1


def counts(net: Any, x: Any) -> Any:
    net.count += 1
    with torch.no_grad():
        net.mean.mul_(0.5).add_(x.mean(0))
    return x


def test_a_counter_stays_a_tensor_with_data_and_counts() -> None:
    model, alone = Net(counts), Net(counts)
    alone.load_state_dict(model.state_dict())
    stages = split_model(trace_model(model, X), {"two": 1})
    run_stages(stages, X)
    alone(**X)
    assert int(model.count) == 1
    assert torch.equal(model.mean, alone.mean)


def test_what_only_writes_statistics_is_where_they_are_from_and_never_after_the_output() -> None:
    graph = trace_model(Net(counts), X).graph
    group = {node.name: node.colocate or node.name for node in graph.nodes}
    assert {group[name] for name in (":mul_", ":mean", ":add_.1")} == {group["one"]}  # of the mean
    assert group[":add_"] == group["output"]  # of the counter
    assert len(set(group.values())) == 3


def _counted(rank: int, habit: Callable[[Any, Any], Any], recompute: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    model, x = Net(habit, inside=habit is not counts), torch.ones(8, 4, dtype=torch.float64)
    how: dict[str, Any] = {"stage_of": {"one": 0, "two": 1}, "heartbeat": None, "microbatches": 4}
    run = pipeline(model, x, squares_to, **group_options(recompute=recompute, costs="counted", check=False, **how))
    run.step(x, x)
    return {name: each.grad for name, each in run.named_parameters() if each.grad is not None} | dict(
        run.named_buffers()
    )


def replaces(net: Any, x: Any) -> Any:
    net.mean = 0.5 * net.mean + x.mean(0).detach()
    return x - net.mean


def calls_and_replaces(net: Any, x: Any) -> Any:
    return replaces(net, net.inner(x))


def test_a_module_that_replaces_its_buffer_is_whole_and_a_model_that_does_is_refused() -> None:
    model, alone = Net(calls_and_replaces, inside=True), Net(calls_and_replaces, inside=True)
    alone.load_state_dict(model.state_dict())
    traced = trace_model(model, X)
    assert traced.leaves["middle"] == "its code puts another tensor in the place of its buffer mean"
    run_stages(split_model(traced, {"two": 1}), X)
    alone(**X)
    assert torch.equal(model.middle.mean, alone.middle.mean)
    with pytest.raises(Untraceable, match="another tensor in the place of its buffer mean"):
        trace_model(Net(replaces), X)


def without_gradients(net: Any, x: Any) -> Any:
    with torch.no_grad():
        still = net.middle.inner(x)
    with torch.autocast("cpu", enabled=False):
        full = net.middle.inner(x.double())
    return still + full.tanh()


def test_modules_are_called_without_gradients_and_in_the_precision_that_the_model_says() -> None:
    model = Net(without_gradients)
    stages = split_model(trace_model(model, X), {"middle": 0, "two": 1})
    assert compare_gradients(model, stages, X, squares) < 1e-12
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(run_stages(stages, X), model(**X))


def drops(net: Any, x: Any) -> Any:
    return x * 2 if net.training else x


def drops_path(net: Any, x: Any) -> Any:
    return x + net.middle(x)


@pytest.mark.parametrize("training", [True, False])
def test_a_module_that_hands_on_what_it_is_given_in_evaluation_is_cut_for_both_modes(training: bool) -> None:
    model = Net(drops_path)
    model.middle.habit = drops
    stages = split_model(trace_model(model.train(training), X), {"two": 1})
    for mode in (True, False):
        model.train(mode)
        for stage in stages:
            stage.module.train(mode)
        assert torch.equal(run_stages(stages, X), model(**X))


def rolls(net: Any, x: Any) -> Any:
    return x if random.random() < 0.5 else net.middle.inner(x)


def test_random_numbers_of_python_are_refused_and_stay_as_they_were() -> None:
    before = random.getstate()
    with pytest.raises(Untraceable, match="draws from Python's"):
        trace_model(Net(rolls, inside=False), X)
    assert random.getstate() == before


def counts_calls(net: Any, x: Any) -> Any:
    net.calls = getattr(net, "calls", 0) + 1
    return net.middle.inner(x) * net.calls


def test_a_number_that_grows_with_each_call_is_noticed_where_the_model_itself_keeps_it() -> None:
    model = Net(counts_calls)
    with pytest.raises(PipelineError, match=r"changes its own attribute 'calls'.*from not there to 1"):
        compare_gradients(model, split_model(trace_model(model, X), {"two": 1}), X, squares)
    assert not hasattr(model, "calls")


class Changing(nn.Module):  # type: ignore[misc]
    """Normalises its input in place, as preprocessing does."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()

    def forward(self, x: Any) -> Any:
        x -= 0.5
        return self.two(self.one(x.mul_(2)))


def masked(model: Any, hidden: Any) -> Any:
    hidden[:, 0] = 0.0
    return hidden


def summed(model: Any, hidden: Any) -> Any:
    hidden[:, :2] += hidden[:, 2:].detach()
    return {"hidden": hidden}


def scaled(model: Any, hidden: Any) -> Any:
    hidden.t()[1].mul_(3.0)
    return hidden


@pytest.mark.parametrize("end", [masked, summed, scaled])
def test_what_is_written_to_a_result_at_last_is_in_it(end: Any) -> None:
    class Ends(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Any) -> Any:
            return end(self, self.two(self.one(x)))

    model, x = Ends(), torch.randn(3, 4)
    found, expected = run_stages(split_model(trace_model(model, x), {"two": 1}), {"x": x}), model(x)
    for mine, its in zip(tensors_of(found), tensors_of(expected), strict=True):
        assert torch.equal(mine, its)
        weights = tuple(model.parameters())
        for one, other in zip(*(torch.autograd.grad(each.sum(), weights) for each in (mine, its)), strict=True):
            assert torch.equal(one, other)


def test_what_a_model_is_given_is_not_changed_so_that_a_forward_can_be_done_again() -> None:
    model, given = Changing(), {"x": X["x"].clone()}
    stages = split_model(trace_model(model, given), {"two": 1})
    first = run_stages(stages, given)
    assert torch.equal(run_stages(stages, given), first)
    assert torch.equal(given["x"], X["x"])
    assert compare_gradients(model, stages, given, squares) < 1e-12


def listens(net: Any, x: Any) -> Any:
    if x.requires_grad:
        x.register_hook(lambda gradient: gradient / 2)
    return x


def test_a_hook_on_a_tensor_is_for_passes_with_gradients_and_hears_each_once() -> None:
    model = Net(listens)
    traced = trace_model(model, X)
    stages = split_model(traced, {"two": 1})
    with torch.no_grad():
        assert torch.equal(run_stages(stages, X), model(**X))
    assert compare_gradients(model, stages, X, squares) < 1e-12
    assert (why_not_split(stages[0]), why_not_split(stages[1])) == (":register_hook has a hook on a tensor", None)
    assert len(measure_graph(traced.graph, node_modules(traced), X, repeats=1).graph.nodes) == len(traced.graph.nodes)


class Choosing(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()

    def forward(self, x: Any, mask: Any = None, scale: float = 1.0, table: Any = None) -> Any:
        x = self.one(x) * scale
        x = x if table is None else x + table.sum()
        return self.two(x if mask is None else x * mask)


MASK = torch.ones(3, 4, dtype=torch.float64)


def test_an_argument_that_is_needed_and_none_is_refused() -> None:
    arguments = Arguments(Choosing())
    arguments.traced_with({**X, "mask": MASK})
    arguments.check({**X, "mask": None})  # a process that does not read it
    with pytest.raises(PipelineError, match="'mask' is None, but was not"):
        arguments.check({**X, "mask": None}, ["mask"])


def test_an_argument_without_samples_is_named_and_is_of_any_size() -> None:
    model, table = Choosing(), torch.ones(5, dtype=torch.float64)
    with pytest.raises(Untraceable, match=r"in EngineOptions\.unsplit_inputs"):
        trace_model(model, {**X, "table": table})
    stages = split_model(trace_model(model, {**X, "table": table}, ["table"]), {"two": 1})
    for length in (5, 3, 7):
        given = {**X, "table": torch.ones(length, dtype=torch.float64)}
        assert torch.equal(run_stages(stages, given), model(**given))


def test_a_result_that_cannot_be_followed_is_named() -> None:
    class Cache:
        def __init__(self, tensor: Any) -> None:
            self.tensor = tensor

    def keeping(net: Any, x: Any) -> Any:
        return {"logits": x, "past": Cache(x)}

    model = Net(keeping)
    model.two = nn.Identity()
    with pytest.raises(Untraceable, match=r"returns a Cache \(in result\['past'\]\)"):
        trace_model(model, X)


def _told(rank: int) -> list[str]:
    """Return the messages of each rank, of which only one is given a value that does not fit."""
    model = Choosing().train()
    run = pipeline(
        model,
        {**X, "scale": 2.0},
        squares_to,
        plan=PlanOptions(stage_of={"one": 0, "two": 1}),
        engine=EngineOptions(heartbeat=None),
    )
    with pytest.raises(PipelineError) as changed:
        run.step({**X, "scale": 2.0 if rank else 3.0}, X["x"])
    with pytest.raises(PipelineError) as lacking:
        run.step({**X, "scale": 2.0})
    run.step({**X, "scale": 2.0}, X["x"])
    with pytest.raises(PipelineError) as refused:
        pipeline(model, X, WithParameters(), engine=EngineOptions(heartbeat=None))
    return [str(each.value) for each in (changed, lacking, refused)]


def squares_to(output: Any, target: Any) -> Any:
    return (output - target).square().mean()


class WithParameters(nn.Linear):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__(2, 2)


def test_what_one_rank_is_given_that_does_not_fit_is_told_on_all() -> None:
    one, other = ranks.run(2, _told)
    assert one == other
    changed, lacking, refused = one
    assert changed.startswith("rank 0: the argument 'scale'")
    assert "give as targets what it was made from" in lacking
    assert refused == "the loss has parameters, which would not be trained: make it a part of the model"


class Recomputing(nn.Module):  # type: ignore[misc]
    """Keeps inputs only, as the model itself says; the last block is called twice. It draws in modules and beside."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.one = way, nn.Linear(4, 6)
        self.blocks = nn.ModuleList([Recomputed(way) for _ in range(2)])
        self.two = nn.Linear(6, 4)
        self.double()

    def forward(self, x: Any) -> Any:
        x = self.one(x)
        for block in (*self.blocks, self.blocks[1]):
            x = block(x)
        return self.two(x)


class Recomputed(nn.Module):  # type: ignore[misc]
    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.layer, self.norm, self.drop = way, nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.3)

    def inner(self, x: Any) -> Any:
        return x + F.dropout(self.drop(self.norm(self.layer(x))).tanh(), 0.3, self.training)

    def forward(self, x: Any) -> Any:
        return self.inner(x) if self.way == "kept" else checkpoint(self.inner, x, use_reentrant=self.way == "old")


def _recomputed(rank: int, schedule: str, other: str) -> list[dict[str, Any]]:
    """Gradients and statistics after two steps, of a model that keeps all and of one that recomputes."""
    found, x = [], torch.randn(8, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for way in ("kept", other):
        torch.manual_seed(0)
        how: dict[str, Any] = {"stage_of": {"blocks.0": 0, "blocks.1": 1}, "heartbeat": None, "microbatches": 2}
        run = pipeline(Recomputing(way), x, squares_to, schedule=schedule, **group_options(**how))
        for _ in range(2):
            run.step(x, x)
        found.append({name: each.grad.clone() for name, each in run.named_parameters()} | dict(run.named_buffers()))
    return found


@pytest.mark.parametrize(("schedule", "other"), [("1f1b", "new"), ("zb-h1", "old")])
def test_activation_checkpoints_of_the_model_drop_the_same_once_more_and_count_once(schedule: str, other: str) -> None:
    for kept, recomputed in ranks.run(2, _recomputed, schedule, other):
        assert ranks.same(kept, recomputed)


@pytest.mark.parametrize("habit", [counts, calls_and_replaces])
def test_a_forward_that_is_done_again_begins_with_what_it_had_and_changes_nothing_more(habit: Any) -> None:
    for once, again in zip(ranks.run(2, _counted, habit, False), ranks.run(2, _counted, habit, True), strict=True):
        assert ranks.same(once, again)
