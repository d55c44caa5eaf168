"""Rounding and random numbers are not taken for samples that meet, and hide none that do."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as f  # noqa: E402

from everstep.pipeline.errors import PipelineError  # noqa: E402
from everstep.pipeline.meeting_samples import FirstLook  # noqa: E402
from tests.long_sweeps import only_in_long_sweeps  # noqa: E402
from tests.pipeline.test_samples_meet import Twins, info_nce, look, twins  # noqa: E402

pytestmark = pytest.mark.torch


class Noise(nn.Module):  # type: ignore[misc]
    def forward(self, x: Any) -> Any:
        return x + torch.randn_like(x) if self.training else x


def test_numbers_that_are_drawn_in_front_of_a_layer_of_zeros_are_no_samples_that_meet() -> None:
    """As stochastic depth draws them: the loss is the same each time, and gradients are not."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), Noise(), nn.Linear(6, 4))
    nn.init.zeros_(model[2].weight)
    look(model, {"input": torch.randn(8, 6)}, torch.arange(8) % 4, f.cross_entropy)


class Pupil(nn.Module):  # type: ignore[misc]
    """Begins as a copy of what it learns from."""

    def __init__(self, is_centred: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.own, self.teacher, self.is_centred = nn.Linear(6, 4), nn.Linear(6, 4), is_centred
        self.teacher.load_state_dict(self.own.state_dict())
        self.teacher.requires_grad_(False)

    def forward(self, x: Any) -> Any:
        own, taught = self.own(x), self.teacher(x)
        return (own - own.mean(0), taught - taught.mean(0)) if self.is_centred else (own, taught)


def entropy(output: Any) -> Any:
    return -(output.softmax(-1) * output.log_softmax(-1)).sum(-1).mean()


DISTILLING: list[Callable[..., Any]] = [
    lambda output, targets: (
        9 * f.kl_div((output[0] / 3).log_softmax(-1), (output[1] / 3).softmax(-1), reduction="batchmean")
    ),
    lambda output, targets: f.cross_entropy(output[0], output[1].softmax(-1)) - entropy(output[1]),
    lambda output, targets: f.kl_div(
        output[0].log_softmax(-1), output[1].log_softmax(-1), reduction="batchmean", log_target=True
    ),
    lambda output, targets: f.cross_entropy(output[0], output[1].softmax(-1)),
    lambda output, targets: (1 - f.cosine_similarity(output[0], output[1])).mean(),
]


@pytest.mark.parametrize("loss", DISTILLING)
@pytest.mark.parametrize("dtype", [torch.float32, *only_in_long_sweeps(torch.float64)])
def test_rounding_between_a_model_and_its_copy_is_not_taken_for_samples_that_meet(loss: Any, dtype: Any) -> None:
    model, targets = Pupil(is_centred=False).to(dtype), torch.arange(16)
    for seed in range(4):
        x = torch.randn(16, 6, generator=torch.Generator().manual_seed(seed), dtype=dtype)
        look(model, {"x": x}, targets, loss, microbatch=8)
        FirstLook(loss, None, 2)(model(x), targets)
    with pytest.raises(PipelineError, match="they meet in the model"):
        look(Pupil(is_centred=True).to(dtype), {"x": x}, targets, loss)
    with pytest.raises(PipelineError, match="the loss takes them together"):
        FirstLook(lambda output, targets: loss(centre(output), targets), None, 2)(model(x), targets)


def centre(output: Any) -> Any:
    return tuple(each - each.mean(0) for each in output)


def test_samples_that_meet_are_found_where_weights_that_are_a_little_others_have_no_loss() -> None:
    class Bounded(Twins):
        def forward(self, left: Any, right: Any) -> Any:
            return super().forward(left, right), self.one.weight.square().sum()

    model = Bounded(compares=False)
    here = float(model.one.weight.detach().square().sum())

    def bounded(output: Any, targets: Any) -> Any:
        return info_nce(output[0], targets) + (1e6 * ((output[1] - here).abs() - 1e-3).relu()).exp()

    with pytest.raises(PipelineError, match="would train something else"):
        look(model, twins(), torch.arange(16), bounded)


class Words(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(20, 8), nn.Linear(8, 20)

    def forward(self, tokens: Any) -> Any:
        return self.head(self.embed(tokens).cumsum(1))


def improve(advantages: Any, output: Any, targets: Any) -> Any:
    """The loss of GRPO: zero before training, as advantages of a group are, together."""
    chosen = output[:, :-1].log_softmax(-1).gather(-1, targets["tokens"][:, 1:, None])[..., 0]
    ratio = (chosen - targets.get("before", chosen.detach())).exp()
    given = advantages(targets["rewards"])[:, None]
    return -torch.minimum(ratio * given, ratio.clamp(0.8, 1.2) * given).mean(1).mean()


def normalise(rewards: Any) -> Any:
    return (rewards - rewards.mean(-1, keepdim=True)) / (rewards.std(-1, keepdim=True) + 1e-4)


@pytest.mark.parametrize("is_known", [True, False])
def test_losses_of_samples_that_cancel_each_other_are_not_taken_for_samples_that_meet(is_known: bool) -> None:
    model, random = Words(), torch.Generator().manual_seed(0)
    tokens, rewards = torch.randint(20, (16, 6), generator=random), torch.rand(16, generator=random)
    given, targets = {"tokens": tokens}, {"tokens": tokens, "rewards": rewards}
    if is_known:
        before = torch.cat([model(each).log_softmax(-1)[:, :-1].detach() for each in tokens.split(1)])
        targets["before"] = before.gather(-1, tokens[:, 1:, None])[..., 0]
    loss = partial(improve, lambda advantages: advantages)
    for samples, microbatch in ((4, 4), (4, 8), (2, 2)):
        known = {**targets, "rewards": normalise(rewards.view(-1, samples)).flatten()}
        look(model, given, known, loss, microbatch=microbatch)
        FirstLook(loss, None, 2)(model(tokens), known)
    for other in (normalise, lambda rewards: rewards - rewards.mean()):
        with pytest.raises(PipelineError, match="the loss takes them together"):
            look(model, given, targets, partial(improve, other), microbatch=4)


def test_a_loss_whose_terms_cancel_each_other_within_a_sample_is_not_taken_for_samples_that_meet() -> None:
    """As of advantages that are normalised over the words of a text."""
    random = torch.Generator().manual_seed(0)
    tokens, rewards = torch.randint(20, (8, 6), generator=random), torch.rand(8, 5, generator=random)
    model, loss = Words(), partial(improve, lambda advantages: advantages)

    def within(output: Any, targets: Any) -> Any:
        chosen = output[:, :-1].log_softmax(-1).gather(-1, targets["tokens"][:, 1:, None])[..., 0]
        return -((chosen - targets["before"]).exp() * normalise(targets["rewards"])).mean()

    before = torch.cat([model(each).log_softmax(-1)[:, :-1].detach() for each in tokens.split(1)])
    targets = {"tokens": tokens, "before": before.gather(-1, tokens[:, 1:, None])[..., 0]}
    look(model, {"tokens": tokens}, {**targets, "rewards": rewards}, within, microbatch=2)
    known = {**targets, "rewards": normalise(rewards[:, 0].view(-1, 2)).flatten()}
    look(model, {"tokens": tokens}, known, loss, microbatch=2, least=2)


def test_a_small_part_of_a_loss_that_takes_samples_together_is_found_by_what_it_alone_trains() -> None:
    """Its gradients are nothing beside those of the rest."""

    class Both(Twins):
        def __init__(self) -> None:
            super().__init__(compares=False)
            self.large = nn.Linear(6, 1)
            nn.init.zeros_(self.large.weight)
            nn.init.zeros_(self.large.bias)

        def forward(self, left: Any, right: Any) -> Any:
            return super().forward(left, right), self.large(left)

    def both(output: Any, targets: Any) -> Any:
        return 1e-2 * info_nce(output[0], targets) + 1e3 * output[1].mean()

    with pytest.raises(PipelineError, match="the loss takes them together"):
        look(Both(), twins(), torch.arange(16), both)


@pytest.mark.parametrize("is_wide", [True, False])
@pytest.mark.parametrize("gain", [0.0, 0.01])
def test_a_loss_over_all_samples_is_found_behind_a_last_layer_of_small_weights(is_wide: bool, gain: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 4))
    nn.init.orthogonal_(model[2].weight, gain)
    model, given = model.to(torch.float64 if is_wide else torch.float32), torch.randn(8, 6)
    given = {"input": given.to(model[0].weight)}

    def balanced(output: Any, targets: Any) -> Any:
        mean = output.softmax(-1).mean(0)
        return f.cross_entropy(output, targets) + (mean * mean.log()).sum()

    look(model, given, torch.arange(8) % 4, f.cross_entropy)
    with pytest.raises(PipelineError, match="the loss takes them together"):
        look(model, given, torch.arange(8) % 4, balanced)


def all_together(output: Any, targets: Any) -> Any:
    return (output[0] - 1).square().mean() + output[0].mean(0).square().sum() + output[1].square().mean()


@pytest.mark.parametrize("given", [(0.0, 0.0), (0.5, 0.5), (0.0, None)])
def test_outputs_that_are_alike_leave_open_whether_a_loss_takes_samples_together(given: Any) -> None:
    random = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    looking = FirstLook(all_together, None, 2)
    looking(tuple(random if each is None else torch.full((8, 3), each) for each in given), torch.arange(8))
    with pytest.raises(PipelineError, match="the loss takes them together"):
        looking((random, random), torch.arange(8))


def test_outputs_that_are_always_alike_are_looked_at_ever_more_rarely() -> None:
    made, calls = list[int](), list[int]()
    loss = Growing(lambda: made.append(1))
    looking = FirstLook(loss, None, 2)
    random = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    for _ in range(32):
        made.clear()
        looking((random, torch.ones(8, 1)), torch.arange(8))
        calls.append(len(made))
    assert [place for place, each in enumerate(calls, 1) if each > 1] == [1, 2, 4, 8, 16, 32]
    loss.weight = 0.5
    with pytest.raises(PipelineError, match="the loss takes them together"):
        looking((random, torch.ones(8, 1)), torch.arange(8))


class Growing:
    """Has a part of all samples that is of no weight at first."""

    def __init__(self, tell: Callable[[], None]) -> None:
        self.weight, self.tell = 0.0, tell

    def __call__(self, output: Any, targets: Any) -> Any:
        self.tell()
        return (output[0] - 1).square().mean() + self.weight * output[0].mean(0).square().sum() + output[1].mean()
