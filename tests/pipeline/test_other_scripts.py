"""Scripts as people write them around a pipeline train what they train in one process, or are told why not."""

from __future__ import annotations

import copy
import logging
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

pytest.importorskip("torch")
import torch
from torch import nn
from torch.nn import functional as f

from everstep.pipeline import Pipeline, pipeline
from everstep.pipeline.counted_targets import CountedTargets
from everstep.pipeline.errors import PipelineError
from everstep.pipeline.frontend.record import Untraceable
from everstep.pipeline.frontend.trace import trace_model
from tests.checkpoint import ranks
from tests.pipeline.grouping import group_options

pytestmark = pytest.mark.torch

HIDDEN = 8
RNG = random.Random(1)


class Net(nn.Module):  # type: ignore[misc]  # torch is not where types are checked
    """Two layers with something between them, of which the code of the model drops some."""

    def __init__(self, between: nn.Module | None = None, *, drop: float = 0.0, gives_aux: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.between, self.two = nn.Linear(6, HIDDEN), between or nn.Tanh(), nn.Linear(HIDDEN, 3)
        self.drop, self.aux = drop, nn.Linear(HIDDEN, 3) if gives_aux else None
        self.double()

    def forward(self, x: Any) -> Any:
        x = self.one(x)
        aux = self.aux(x) if self.aux is not None else None
        made = self.two(f.dropout(self.between(x).tanh(), self.drop, self.training))
        return made if aux is None else (made, aux)


def batch(number: int, samples: int = 8) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(number)
    return tuple(torch.randn(samples, size, generator=generator, dtype=torch.float64) for size in (6, 3))


def squared(output: Any, target: Any) -> Any:
    return (output - target).square().mean()


def cut(model: nn.Module, loss: Any = squared, given: Any = None, **more: Any) -> Pipeline:
    inputs, targets = given or batch(0)
    keywords: dict[str, Any] = {"microbatches": 2, "heartbeat": None, "costs": "counted", **more}
    last = "two" if isinstance(model, Net) else "out" if isinstance(model, Words) else "3"
    keywords.setdefault("stage_of", {last: 1})
    return pipeline(model, inputs, loss, targets=targets, **group_options(**keywords))


def say(work: Callable[[], Any]) -> str:
    try:
        return f"gave {work()!r}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def largest_difference(run: nn.Module, model: nn.Module) -> float:
    wanted = dict((*model.named_parameters(), *model.named_buffers()))
    own = (*run.named_parameters(), *run.named_buffers())
    return max(float((each.detach() - wanted[name].detach()).abs().max()) for name, each in own)


# ---- between the batches of a step ----


def _clear(rank: int, to_none: bool) -> list[str]:
    said = []
    with cut(Net()) as run:
        optimizer = torch.optim.SGD(run.groups(), lr=0.1)
        run.step(*batch(0), last=False)
        optimizer.zero_grad(set_to_none=to_none)
        said.append(say(lambda: run.step(*batch(1))))
    with cut(Net()) as run:
        optimizer = torch.optim.SGD(run.groups(), lr=0.1)
        run.step(*batch(0), last=False)
        said.append(say(optimizer.step))
        run.step(*batch(0))
        said.append(say(optimizer.step))
    return said


@pytest.mark.parametrize("to_none", [True, False])
def test_a_script_that_clears_gradients_or_steps_within_a_step_is_told(to_none: bool) -> None:
    for cleared, stepped, after in ranks.run(2, _clear, to_none):
        assert f"was {'cleared' if to_none else 'changed'} between the batches of one step" in cleared
        assert "SGD was to step between the batches of one step of a pipeline" in stepped
        assert after == "gave None"


def _restore(rank: int) -> float:
    model, one = Net(), Net()
    with cut(model) as run:
        kept = copy.deepcopy(dict(run.state_dict()))
        run.step(*batch(0), last=False)
        run.load_state_dict(kept)
        optimizer, other = torch.optim.SGD(run.groups(), lr=0.1), torch.optim.SGD(one.parameters(), lr=0.1)
        run.step(*batch(1))
        squared(one(batch(1)[0]), batch(1)[1]).backward()
        optimizer.step()
        other.step()
        return largest_difference(run, one)


def test_a_restore_within_a_step_begins_the_step_anew() -> None:
    assert max(ranks.run(2, _restore)) < 1e-12


def _train(rank: int, how: str) -> list[str]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("everstep.pipeline").addHandler(handler)
    with torch.device("meta" if how == "of parameters without data" else "cpu"):
        model = Net()
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    with cut(model) as run:
        optimizer = torch.optim.SGD(run.groups(), lr=0.0 if how == "a rate of 0" else 0.1)
        if how == "a rate of 0 in one kernel":
            optimizer = torch.optim.AdamW(run.groups(), lr=0.0, fused=True)
        for number in range(4):
            run.step(*batch(number))
            if how == "by hand" and number % 2 == 0:
                continue
            if how == "cleared":
                optimizer.zero_grad()
            elif how == "by data":
                for each in run.parameters():
                    each.data -= 0.1 * each.grad
            else:
                (early if "data" in how else optimizer).step()
    return [each for each in said if "left gradients that no optimizer has used" in each]


@pytest.mark.parametrize("how", ["by hand", "of parameters without data"])
def test_gradients_of_a_step_that_nothing_uses_are_told_once(how: str) -> None:
    assert [len(said) for said in ranks.run(2, _train, how)] == [1, 1]


@pytest.mark.parametrize("how", ["each", "a rate of 0", "a rate of 0 in one kernel", "cleared", "by data"])
def test_gradients_that_are_used_or_cleared_are_none_to_tell_of(how: str) -> None:
    assert ranks.run(2, _train, how) == [[], []]


def _add_up_statistics(rank: int) -> float:
    worst = 0.0
    model, one = Net(nn.BatchNorm1d(HIDDEN)), Net(nn.BatchNorm1d(HIDDEN))
    with cut(model, microbatches=1) as run:
        for number in range(4):
            run.step(*batch(number), last=number % 2 == 1)
            one(batch(number)[0])
            worst = max(worst, largest_difference(run, one))
    return worst


def test_batches_that_are_added_up_update_running_statistics_one_by_one() -> None:
    assert max(ranks.run(2, _add_up_statistics)) < 1e-12


# ---- norms ----


def _measure(rank: int) -> list[str]:
    from torch.nn.utils import clip_grads_with_norm_, get_total_norm

    with cut(Net()) as run:
        run.step(*batch(0))
        parameters = list(run.parameters())
        said = [say(lambda: get_total_norm([each.grad for each in parameters]))]
        said.append(say(lambda: clip_grads_with_norm_(parameters, 1.0, torch.ones(()))))
        said.append(say(lambda: torch.nn.utils.clip_grad_value_(parameters, 1.0)))
        said.append(say(lambda: float(get_total_norm([torch.ones(4)]))))
    return [*said, say(lambda: float(get_total_norm([each.grad for each in parameters])) > 0)]


def test_a_norm_of_the_gradients_of_one_process_is_refused() -> None:
    for total, clipped, by_value, other, after in ranks.run(2, _measure):
        assert "call run.clip_grad_norm_(max_norm) on all processes" in total
        assert "call run.clip_grad_norm_(max_norm) on all processes" in clipped
        assert (by_value, other, after) == ("gave None", "gave 2.0", "gave True")


# ---- modes ----


def _set_modes(rank: int) -> list[float]:
    model, one = Net(drop=0.5), Net(drop=0.5)

    def make_loss(of: nn.Module) -> Any:
        return lambda output, target: squared(output, target) * (2 if of.training else 1)

    apart = []
    with cut(model, make_loss(model), microbatches=1, check=False) as run:
        for of in (run, model):
            of.eval()
            one.eval()
            found = run.evaluate(*batch(1)).loss
            apart.append(found - float(make_loss(one)(one(batch(1)[0]), batch(1)[1])))
            of.train()
            apart.append(float(model.training) - 1)
    return apart


def test_a_model_and_its_pipeline_have_one_mode() -> None:
    for apart in ranks.run(2, _set_modes):
        assert max(map(abs, apart)) < 1e-12, apart


# ---- what counts ----


class Words(nn.Module):  # type: ignore[misc]
    def __init__(self, **of_embedding: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.out = nn.Embedding(100, HIDDEN, **of_embedding), nn.Linear(HIDDEN, 9)

    def forward(self, words: Any) -> Any:
        return self.out(self.embed(words).tanh())


def mean_of_words(output: Any, target: Any) -> Any:
    if isinstance(target, dict):
        return f.cross_entropy(output[target["mask"]], target["words"][target["mask"]])
    return f.cross_entropy(output.flatten(0, 1), target.flatten())


def mean_of_samples(output: Any, target: Any) -> Any:
    losses = f.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="none").view(target.shape)
    return (losses.sum(1) / (target != -100).sum(1).clamp(min=1)).mean()


def _pad_later(rank: int, masked: bool) -> list[str]:
    words = torch.arange(40).view(8, 5)
    full, padded = words % 9, (words % 9).clone()
    padded[1:3, 2:] = -100
    given: Any = (words, full)
    later: Any = padded
    if masked:
        given, later = (
            (words, {"words": full, "mask": full >= 0}),
            {"words": full, "mask": padded >= 0},
        )
    said = []
    with cut(Words(), mean_of_words, given, loss_weight=None if masked else lambda _, y: (y != -100).sum()) as run:
        if not masked:
            said.append(say(lambda: run.step(words, later).skipped))
    if not masked:
        with cut(Words(), mean_of_samples, given) as run:
            said.append(say(lambda: run.step(words, later).skipped))
    with cut(Words(), mean_of_words, given) as run:
        run.step(*given)
        return [*said, say(lambda: run.step(words, later))]


@pytest.mark.parametrize("masked", [False, True])
def test_padding_that_comes_after_the_example_shows_a_mean_over_words(masked: bool) -> None:
    every = ranks.run(2, _pad_later, masked)
    assert any("it is a mean over what counts in the targets" in said[-1] for said in every), every
    for *right, wrong in every:
        assert set(right) <= {"gave False"}
        assert not wrong.startswith("gave")


def test_a_micro_batch_in_which_nothing_counts_leaves_open_what_a_loss_is_a_mean_of() -> None:
    loss, outputs = CountedTargets(mean_of_words, None), torch.linspace(-1.0, 1.0, 8 * 5 * 9).view(8, 5, 9)
    targets = torch.arange(40).view(8, 5) % 9
    targets[:4] = -100
    loss.see(targets)
    loss(outputs[:4], targets[:4])
    with pytest.raises(PipelineError, match="it is a mean over what counts in the targets"):
        loss(outputs[4:], targets[4:])


def _scale_by_frequency(rank: int) -> list[str]:
    words = torch.arange(40).view(8, 5)
    given = words, words % 9

    def close_cut(count: int) -> None:
        cut(Words(scale_grad_by_freq=True), mean_of_words, given, microbatches=count).close()

    return [say(partial(close_cut, count)) for count in (2, 1)]


def test_gradients_by_the_frequency_of_words_are_refused_where_a_batch_is_cut() -> None:
    for several, one in ranks.run(2, _scale_by_frequency):
        assert "module 'embed' is an Embedding with scale_grad_by_freq=True" in several
        assert one == "gave None"


def _write_output(rank: int) -> float:
    def loss(output: Any, target: Any) -> Any:
        made, aux = output
        return squared(made, target) + aux.mul_(2).square().mean()

    model, one = Net(gives_aux=True), Net(gives_aux=True)
    with cut(model, loss, stage_of={"between": 1}, check=False) as run:
        run.step(*batch(0))
        loss(one(batch(0)[0]), batch(0)[1]).backward()
        wanted = dict(one.named_parameters())
        return max(float((each.grad - wanted[name].grad).abs().max()) for name, each in run.named_parameters())


def test_a_loss_may_write_what_an_early_stage_has_made() -> None:
    assert max(ranks.run(2, _write_output)) < 1e-12


# ---- what a model has ----


class Dropped(nn.Module):  # type: ignore[misc]
    """Leaves its layer out now and then, by Python's random numbers from a generator of its own."""

    def __init__(self, generator: random.Random | None) -> None:
        super().__init__()
        self.layer, self.generator = nn.Linear(HIDDEN, HIDDEN), generator

    def forward(self, x: Any) -> Any:
        drawn = RNG.random() if self.generator is None else self.generator.random()
        return x if drawn < 0.1 else x + self.layer(x)


@pytest.mark.parametrize("generator", [random.Random(1), None])
def test_draws_from_a_generator_of_its_own_are_no_part_of_a_trace(generator: random.Random | None) -> None:
    before = (generator or RNG).getstate()
    with pytest.raises(Untraceable, match="draws from Python's or numpy's random numbers"):
        trace_model(Net(Dropped(generator)), batch(0)[0])
    assert (generator or RNG).getstate() == before


def _draw_in_blocks(rank: int) -> list[float]:
    def build() -> nn.Module:
        torch.manual_seed(0)
        blocks = [Dropped(random.Random(number)) for number in range(3)]
        return nn.Sequential(nn.Linear(6, HIDDEN), *blocks, nn.Linear(HIDDEN, 3)).double()

    one, apart = build(), []
    with cut(build(), microbatches=1) as run:
        for number in range(6):
            found = run.step(*batch(number)).loss
            apart.append(found - float(squared(one(batch(number)[0]), batch(number)[1])))
    return apart


def test_pipeline_leaves_the_generators_of_modules_where_they_are() -> None:
    for apart in ranks.run(2, _draw_in_blocks):
        assert max(map(abs, apart)) < 1e-12, apart


class Counting(nn.Module):  # type: ignore[misc]
    """Saves a number beside its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.count = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN), 0

    def forward(self, x: Any) -> Any:
        return self.two(self.one(x))

    def get_extra_state(self) -> int:
        return self.count

    def set_extra_state(self, state: int) -> None:
        self.count = state


class CountingNet(Net):
    get_extra_state = Counting.get_extra_state


def test_a_module_with_a_state_of_its_own_is_in_one_stage() -> None:
    hooked = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN))
    hooked._register_state_dict_hook(lambda module, state, prefix, more: None)
    for between, why in ((Counting(), "get_extra_state"), (hooked, "hooks on its state dictionary")):
        found = trace_model(Net(between), batch(0)[0])
        assert why in found.leaves["between"]


def _count_at_the_top(rank: int) -> str:
    return say(lambda: cut(CountingNet()))


def test_a_model_with_an_extra_state_of_its_own_is_refused() -> None:
    for said in ranks.run(2, _count_at_the_top):
        assert "has a get_extra_state() of its own" in said
        assert PipelineError.__name__ in said or "Everywhere" in said


# ---- parts of a loss that come later ----


class Growing(nn.Module):  # type: ignore[misc]
    """Has a part that is of no weight at first: of each sample, or of all together."""

    def __init__(self, of_all: bool) -> None:
        super().__init__()
        self.of_all, self.weight = of_all, 0.0

    def forward(self, output: Any, target: Any) -> Any:
        part = output.mean(0) if self.of_all else output
        return squared(output, target) + self.weight * part.square().mean()


def _say_step(run: Any) -> str:
    return say(lambda: run.step(*batch(1)).skipped)


def _switch_on(rank: int) -> list[str]:
    said = []
    for of_all, given in ((False, batch(0)), (True, batch(0)), (True, batch(0, 1))):
        loss = Growing(of_all)
        with cut(Net(), loss, given) as run:
            run.step(*batch(0))
            loss.weight = 0.5
            said.append(_say_step(run))
    return said


def test_a_part_of_a_loss_that_is_switched_on_later_is_looked_at_then() -> None:
    first, last = ranks.run(2, _switch_on)
    assert first[0] == last[0] == "gave False"
    assert all("Error" in said for said in first[1:])
    assert all("the loss takes them together" in said for said in last[1:]), last
