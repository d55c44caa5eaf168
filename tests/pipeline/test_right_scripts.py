"""Scripts that are right are neither refused nor changed by what finds out those that are not."""

from __future__ import annotations

import copy
import random
from functools import partial
from typing import Any

import pytest

pytest.importorskip("torch")
import torch
from torch import nn
from torch.nn import functional as f

from tests.checkpoint import ranks
from tests.pipeline.test_other_scripts import (
    HIDDEN,
    Net,
    Words,
    batch,
    cut,
    mean_of_samples,
    mean_of_words,
    say,
    squared,
)

pytestmark = pytest.mark.torch


# ---- what is no fault ----


def _clip(rank: int) -> list[float]:
    one = Net()
    squared(one(batch(0)[0]), batch(0)[1]).backward()
    wanted = float(torch.nn.utils.clip_grad_norm_(one.parameters(), 0.1))
    apart = []
    for clip in (None, 0.1):
        with cut(Net(), clip=clip) as run:
            norm = run.step(*batch(0)).norm if clip else float(run.clip_grad_norm_(0.1))
            if not clip:
                run.step(*batch(0))
                norm = float(run.clip_grad_norm_(0.1))
            assert norm is not None
            grads = dict(one.named_parameters())
            apart += [norm - wanted]
            apart += [float((each.grad - grads[name].grad).abs().max()) for name, each in run.named_parameters()]
    return apart


def test_a_pipeline_clips_by_the_norm_of_all_processes() -> None:
    for apart in ranks.run(2, _clip):
        assert max(map(abs, apart)) < 1e-9, apart


def sum_of_words(output: Any, target: Any) -> Any:
    return f.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum"), (target != -100).sum()


def noisy(output: Any, target: Any) -> Any:
    return mean_of_samples(output + torch.randn_like(output), target)


def noisy_in_python(output: Any, target: Any) -> Any:
    return mean_of_samples(output * random.uniform(0.5, 1.5), target)


def many_classes(output: Any, target: Any) -> Any:
    return f.binary_cross_entropy_with_logits(output.mean(1), target.to(output))


def exponential(output: Any, target: Any) -> Any:
    counts = target != -100
    losses = (((output + 31).exp() - target.unsqueeze(-1) * output).sum(-1) * counts).sum(1)
    return (losses / counts.sum(1).clamp(min=1)).mean()


def _tell_skipped(run: Any, words: Any, targets: Any) -> bool:
    return bool(run.step(words, targets).skipped)


def _pad_what_is_right(rank: int) -> list[str]:
    words = torch.arange(40).view(8, 5)
    full, padded = words % 9, (words % 9).clone()
    padded[1:3, 2:] = -100
    classes = torch.zeros(8, 9, dtype=torch.bool)
    classes[:, 0] = True
    more = classes.clone()
    more[2] = True
    said = []
    for loss, first, later in (
        (noisy, full, padded),
        (noisy_in_python, full, padded),
        (exponential, full, padded),
        (sum_of_words, padded, padded),
    ):
        with cut(Words(), loss, (words, first)) as run:
            said.append(say(partial(_tell_skipped, run, words, later)))
    with cut(Words().bfloat16(), many_classes, (words, classes)) as run:
        said.append(say(partial(_tell_skipped, run, words, more)))
    return said


def test_padding_is_no_fault_of_losses_that_draw_count_are_narrow_or_grow_beyond_numbers() -> None:
    for said in ranks.run(2, _pad_what_is_right):
        assert set(said) == {"gave False"}, said


def _pad_what_begins_with_zeros(rank: int) -> str:
    words = torch.arange(40).view(8, 5)
    full, padded = words % 9, (words % 9).clone()
    padded[1:3, 2:] = -100
    model = Words()
    torch.nn.init.zeros_(model.out.weight)
    torch.nn.init.zeros_(model.out.bias)
    with cut(model, mean_of_words, (words, full)) as run:
        return say(lambda: run.step(words, padded))


def test_a_mean_over_words_shows_where_all_outputs_are_zeros() -> None:
    assert any(
        "it is a mean over what counts in the targets" in said for said in ranks.run(2, _pad_what_begins_with_zeros)
    )


def _cut_again_within_a_step(rank: int) -> str:
    model = Net()
    left = cut(model)
    left.step(*batch(0), last=False)
    with cut(model) as run:
        run.step(*batch(0))
        said = say(torch.optim.SGD(run.groups(), lr=0.1).step)
    left.close()
    return said


def test_a_step_that_was_left_is_none_of_the_next_pipeline() -> None:
    assert ranks.run(2, _cut_again_within_a_step) == ["gave None"] * 2


class Renaming(nn.Module):  # type: ignore[misc]
    """Loads what an older version of it has saved."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self._register_load_state_dict_pre_hook(self._rename)

    def _rename(self, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for name in [each for each in state if each.startswith(f"{prefix}old.")]:
            state[name.replace(f"{prefix}old.", f"{prefix}one.")] = state.pop(name)

    def forward(self, x: Any) -> Any:
        return self.two(self.one(x).tanh())


def _load_older(rank: int) -> float:
    torch.manual_seed(1)
    other = {name: torch.randn_like(each) for name, each in Net(Renaming()).state_dict().items()}
    older = {name.replace("between.one", "between.old"): each for name, each in other.items()}
    with cut(Net(Renaming()), stage_of={"between.two": 1}) as run:
        own = {name.replace("between.one", "between.old") for name, _ in run.named_parameters()}
        run.load_state_dict({**{name: older[name] for name in own}, "_extra_state": run.get_extra_state()})
        return max(float((each.detach() - other[name]).abs().max()) for name, each in run.named_parameters())


def test_a_module_that_renames_what_it_loads_is_cut_and_does_so() -> None:
    assert ranks.run(2, _load_older) == [0.0, 0.0]


# ---- short batches ----


def _shorten(rank: int) -> list[Any]:
    found: list[Any] = []
    for samples, parts in ((5, 2), (3, 1), (2, 1), (8, 4)):
        one = Net(nn.BatchNorm1d(HIDDEN))
        with cut(Net(nn.BatchNorm1d(HIDDEN)), microbatches=4) as run:
            inputs, targets = batch(0, samples)
            loss = run.step(inputs, targets).loss
            pieces = zip(inputs.tensor_split(parts), targets.tensor_split(parts), strict=True)
            wanted = sum(squared(one(x), y) * len(x) for x, y in pieces) / samples
            found.append(loss - float(wanted))
    options: dict[str, Any] = {"costs": "measured", "microbatches": None, "given": batch(0, 4)}
    with cut(Net(nn.BatchNorm1d(HIDDEN)), **options) as run:  # as many micro-batches as are best
        found.append(run.step(*batch(0, 4)).skipped)
    found.append(say(lambda: cut(Net(nn.BatchNorm1d(HIDDEN)), microbatches=3, given=batch(0, 4))))
    with cut(Net(nn.BatchNorm1d(HIDDEN)), microbatches=4) as run:
        found.append(say(lambda: run.step(*batch(0, 1))))
    return found


def test_no_microbatch_has_one_sample_where_batch_normalisation_could_not_take_it() -> None:
    every = ranks.run(2, _shorten)
    assert any("Give each replica two samples at least" in said[-1] for said in every), every
    for *apart, too_many, _ in every:
        assert max(map(abs, apart)) < 1e-12, apart
        assert "take 2 micro-batches at most, or larger batches" in too_many


class Squeezed(Net):
    """Gives one number for each sample, and of one sample no samples, as scripts write it."""

    def forward(self, x: Any) -> Any:
        return super().forward(x)[:, :1].squeeze()


def likely(output: Any, target: Any) -> Any:
    return f.binary_cross_entropy_with_logits(output, target)


def likely_squeezed(output: Any, target: Any) -> Any:
    return f.binary_cross_entropy_with_logits(output[..., :1].squeeze(), target)


def _squeeze(rank: int, kind: type[Net], loss: Any) -> list[Any]:
    found: list[Any] = []
    given = batch(0)[0], (batch(0)[1][:, 0] > 0).double()
    for samples in (7, 5, 3, 2):
        one = kind()
        with cut(kind(), loss, given=given, microbatches=4) as run:
            own = run.step(given[0][:samples], given[1][:samples]).loss
            wanted = loss(one(given[0][:samples]), given[1][:samples])
            wanted.backward()
            right = dict(one.named_parameters())
            apart = [float((each.grad - right[name].grad).abs().max()) for name, each in run.named_parameters()]
            found.append(max(abs(own - float(wanted)), *apart))
    found.append(say(lambda: cut(kind(), loss, given=given, microbatches=8)))
    return found


@pytest.mark.parametrize(("kind", "loss"), [(Squeezed, likely), (Net, likely_squeezed)])
def test_no_microbatch_has_one_sample_where_the_loss_could_not_take_it(kind: type[Net], loss: Any) -> None:
    for *apart, too_many in ranks.run(2, _squeeze, kind, loss):
        assert max(apart) < 1e-12, apart
        assert "squeeze() drops the dimension of the sample" in too_many
        assert "take 4 micro-batches at most, or larger batches" in too_many


def test_a_loss_that_meets_no_single_sample_is_still_compared_with_that_of_halves() -> None:
    for said in ranks.run(2, _let_samples_meet):
        assert "4 samples is" in said, said
        assert "in 2 parts" in said, said


def _let_samples_meet(rank: int) -> str:
    def loss(output: Any, target: Any) -> Any:
        return likely_squeezed(output - output.mean(0, keepdim=True), target)

    return say(lambda: cut(Net(), loss, given=(batch(0)[0], (batch(0)[1][:, 0] > 0).double()), microbatches=2))


class Shortcut(nn.Module):  # type: ignore[misc]
    """Asks torch for a tensor that it has already, in training only, as the blocks of U-Nets do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Any) -> Any:
        if self.training:
            x = x.contiguous().to(self.layer.weight.dtype)
        return self.layer(x)


class Skipping(Net):
    """Uses what it gives to a module again, behind it."""

    def forward(self, x: Any) -> Any:
        x = self.one(x)
        return self.two(self.between(x).tanh() * x)


def _skip(rank: int) -> list[float]:
    one = Skipping(Shortcut())
    with cut(copy.deepcopy(one)) as run:
        own = run.step(*batch(0)).loss
        wanted = squared(one(batch(0)[0]), batch(0)[1])
        wanted.backward()
        right = dict(one.named_parameters())
        apart = [float((each.grad - right[name].grad).abs().max()) for name, each in run.named_parameters()]
        return [own - float(wanted), *apart]


def test_what_a_module_is_given_and_torch_returns_as_it_is_may_be_used_around_the_module() -> None:
    for apart in ranks.run(2, _skip):
        assert max(map(abs, apart)) < 1e-12, apart


# ---- layers that do as torch's ----


class NormAct(nn.BatchNorm1d):  # type: ignore[misc]
    """Batch normalisation with an activation, from a copy of torch's own forward, as libraries of image models do."""

    def __init__(self, features: int) -> None:
        super().__init__(features)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Any) -> Any:
        if self.training:
            self.num_batches_tracked.add_(1)
        x = f.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, self.training, self.momentum, self.eps
        )
        return self.act(x)


class CalledNormAct(NormAct):
    """The same by a call of torch's."""

    def forward(self, x: Any) -> Any:
        return self.act(nn.BatchNorm1d.forward(self, x))


def _normalise(rank: int, layer: type[nn.Module]) -> tuple[list[float], dict[str, Any]]:
    between = nn.Sequential(nn.BatchNorm1d(HIDDEN), nn.ReLU()) if layer is nn.Sequential else layer(HIDDEN)
    with cut(Net(between), microbatches=4) as run:
        losses = [run.step(*batch(step)).loss for step in range(3)]
        with torch.no_grad():
            run.eval()
            losses.append(run.evaluate(*batch(3)).loss)
        state = {**dict(run.named_buffers()), **{name: each.grad for name, each in run.named_parameters()}}
        return losses, {name.replace("between.0.", "between."): each.clone() for name, each in state.items()}


@pytest.mark.parametrize("layer", [NormAct, CalledNormAct])
def test_a_layer_that_normalises_batches_as_torch_does_trains_as_torch_s_with_what_it_adds(
    layer: type[nn.Module],
) -> None:
    for (losses, state), (wanted, expected) in zip(
        ranks.run(2, _normalise, layer), ranks.run(2, _normalise, nn.Sequential), strict=True
    ):
        gradients, buffers = ({name: state.pop(name) for name in list(state) if "running" not in name}, state)
        assert losses[:3] == wanted[:3]
        assert ranks.same(gradients, {name: expected.pop(name) for name in gradients})
        # What a layer has mixed by its momentum is taken apart again, which rounds.
        torch.testing.assert_close(buffers, expected, rtol=1e-14, atol=1e-14)
        assert losses[3] == pytest.approx(wanted[3], rel=1e-14)


# ---- random numbers of Python ----


class Jumping(nn.Module):  # type: ignore[misc]
    """Draws from Python's generator, as some do to drop layers."""

    def forward(self, x: Any) -> Any:
        return x * random.uniform(0.9, 1.1)


def jumping(output: Any, target: Any) -> Any:
    return squared(output * random.uniform(0.9, 1.1), target)


def _draw_in_both(rank: int) -> str:
    with cut(nn.Sequential(nn.Linear(6, 4), Jumping(), nn.Tanh(), nn.Linear(4, 3)).double(), jumping) as run:
        return say(lambda: run.step(*batch(0)).skipped)


def test_a_model_and_a_loss_may_both_draw_from_the_generator_of_python() -> None:
    assert ranks.run(2, _draw_in_both) == ["gave False"] * 2
