"""Parameters that several processes have: what a script does to one copy and not to the others is rejected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from everstep.pipeline import EngineOptions, LayoutOptions, PlanOptions, pipeline  # noqa: E402
from everstep.pipeline.errors import PipelineError  # noqa: E402
from tests.checkpoint import ranks  # noqa: E402

pytestmark = pytest.mark.torch

WORDS = torch.arange(40).view(8, 5) * 3 % 11


class Tied(nn.Module):  # type: ignore[misc]  # torch is not where types are checked
    """A language model whose first and last layer share their weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.one, self.two = nn.Embedding(11, 4), nn.Linear(4, 6), nn.Linear(6, 4)
        self.head = nn.Linear(4, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words: Any) -> Any:
        return self.head(self.two(self.one(self.embed(words)).tanh()).tanh())


def _loss(output: Any, targets: Any) -> Any:
    return nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten())


def _make(model: Any = None, **layout: Any) -> Any:
    return pipeline(
        model or Tied(),
        WORDS[:4],
        _loss,
        targets=WORDS[:4],
        stages=2,
        microbatches=2,
        layout=LayoutOptions(**layout),
        plan=PlanOptions(costs="counted", stage_of={"two": 1}),
        engine=EngineOptions(heartbeat=None),
    )


def _by_name(run: Any) -> Any:
    return run.groups(lambda name, shape: {"weight_decay": 0.0} if name.startswith("embed") else {})


def _by_class(run: Any) -> list[dict[str, Any]]:
    """Weight decay for layers and none for embeddings, as scripts for one process have it."""
    decay = {each for module in run.modules() if isinstance(module, nn.Linear) for each in module.parameters()}
    others = [each for each in run.parameters() if each not in decay]
    return [{"params": list(decay), "weight_decay": 0.5}, {"params": others, "weight_decay": 0.0}]


def _add_noise(run: Any) -> None:
    for each in reversed(list(run.parameters())):
        each.grad.add_(torch.randn_like(each.grad))


def _add_alike(run: Any) -> None:
    for name, each in run.named_parameters():
        each.grad.add_(torch.full_like(each.grad, len(name)))


def _train(run: Any, groups: Callable[[Any], Any], change: Callable[[Any], None] = lambda run: None) -> str:
    """Return what rejected one of the steps."""
    with run:
        optimizer = torch.optim.AdamW(groups(run), lr=0.01)
        for _ in range(8):
            try:
                run.step(WORDS[:4], WORDS[:4])
            except PipelineError as error:
                return str(error)
            change(run)
            optimizer.step()
    return ""


def _train_shared(rank: int) -> list[str]:
    found = []
    for groups, change in ((_by_name, _add_alike), (_by_name, _add_noise), (_by_class, _add_alike)):
        torch.manual_seed(1)
        found.append(_train(_make(), groups, change))
    return found


def test_owners_of_a_shared_parameter_that_change_it_differently_are_told() -> None:
    """Each would go on with a weight of its own: in one process it is one."""
    (alike, *apart), other = ranks.run(2, _train_shared)
    assert [alike, *apart] == other
    assert not alike
    for text in apart:
        assert "shared parameter 'embed.weight' is another on ranks 0 and 1" in text
        assert "run.groups(" in text
        assert "register_hook" in text


def _train_replicas(rank: int) -> str:
    run = _make(data_parallel=2)
    torch.manual_seed(rank)
    return _train(run, lambda run: run.groups(), _add_noise)


def test_replicas_that_change_their_parameters_differently_are_told() -> None:
    found = ranks.run(4, _train_replicas)
    assert len(set(found)) == 1
    assert "is another on ranks 0 and 1" in found[0] or "is another on its replicas" in found[0]


class Spectral(nn.Module):  # type: ignore[misc]
    """A layer of a Fourier neural operator, and buffers of types that processes cannot add."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed, self.two = nn.Embedding(11, 4), nn.Linear(4, 11)
        self.weight = nn.Parameter(torch.randn(3, 4, dtype=torch.complex64))
        self.register_buffer("narrow", torch.rand(3).to(torch.float8_e4m3fn))
        self.register_buffer("short", torch.tensor([0, 1, 2], dtype=torch.uint16))
        self.register_buffer("turned", torch.randn(2, dtype=torch.complex64))
        self.register_buffer("flag", torch.tensor(True))
        self.register_buffer("nothing", torch.zeros(0))

    def forward(self, words: Any) -> Any:
        spectrum = torch.fft.rfft(self.embed(words), dim=1) * self.weight * self.turned.real.sum()
        shift = self.narrow.float().sum() + self.short.float().sum() * self.flag + self.nothing.sum()
        return self.two(torch.fft.irfft(spectrum, n=words.shape[1], dim=1) + shift)


def _train_spectral(rank: int) -> tuple[list[float], dict[str, Any]]:
    run = _make(Spectral(seed=rank // 2), data_parallel=2)  # replicas begin with what the first one has
    losses = []
    with run:
        optimizer = torch.optim.SGD(run.groups(), lr=0.1)
        for _ in range(3):
            losses.append(run.step(WORDS[4 * run.replica :][:4], WORDS[4 * run.replica :][:4]).loss)
            optimizer.step()
        weights = {name: torch.view_as_real(each.detach()) if each.is_complex() else each.detach() for name, each in
                   run.named_parameters()}  # fmt: skip
    return losses, {name: each.tolist() for name, each in weights.items()}


def test_replicas_of_a_model_with_numbers_of_all_kinds_train_as_one_process() -> None:
    """gloo adds no float8 and no uint16: their buffers are brought alike all the same."""
    model, losses = Spectral(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        loss = _loss(model(WORDS), WORDS)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    found = ranks.run(4, _train_spectral)
    for told, weights in found:
        assert told == pytest.approx(losses, rel=1e-5)
        for name, each in weights.items():
            meant = model.get_parameter(name).detach()
            meant = torch.view_as_real(meant) if meant.is_complex() else meant
            torch.testing.assert_close(torch.tensor(each), meant, rtol=1e-4, atol=1e-5)
    assert {name for _, weights in found for name in weights} == {name for name, _ in model.named_parameters()}


def _train_plain(rank: int) -> list[str]:
    class Plain(nn.Module):  # type: ignore[misc]
        """Nothing shared, so only replicas have copies."""

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.one, self.two = nn.Embedding(11, 4), nn.Linear(4, 11)

        def forward(self, words: Any) -> Any:
            return self.two(self.one(words))

    found = []
    for seed in (0, rank):
        run = _make(Plain(), data_parallel=2)
        torch.manual_seed(seed)
        found.append(_train(run, lambda run: run.groups(), _add_noise))
    return found


def test_only_what_replicas_do_differently_is_told() -> None:
    found = ranks.run(4, _train_plain)
    assert {alike for alike, _ in found} == {""}
    assert len({apart for _, apart in found}) == 1
    assert "is another on its replicas" in found[0][1]
