"""A tensor lies in memory at its receiver as it does at its sender, so that the same operations copy."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from everstep.pipeline import EngineOptions, LayoutOptions, PlanOptions, pipeline  # noqa: E402
from everstep.pipeline.engine.strides import describe_strides, lay_out  # noqa: E402
from everstep.pipeline.frontend.trace import trace_model  # noqa: E402
from tests.checkpoint import ranks  # noqa: E402

pytestmark = pytest.mark.torch

BLOCK = torch.arange(2 * 3 * 4 * 5).view(2, 3, 4, 5).double()
X = torch.linspace(-1.0, 1.0, 64, dtype=torch.float64).view(8, 8)
SHAPES = {
    "contiguous": BLOCK,
    "transposed": BLOCK.transpose(1, 2),
    "permuted": BLOCK.permute(3, 0, 2, 1),
    "a slice of the first dimension": BLOCK[:, :2],
    "a slice of the last": BLOCK[..., 1:3],
    "every second": BLOCK[..., ::2],
    "one of a dimension": BLOCK[:, 0],
    "the last column": BLOCK[..., -1],
    "expanded": BLOCK[:, :1].expand(2, 3, 4, 5),
    "a part, transposed": BLOCK[:, :, 1:3].transpose(1, 3),
    "one number": BLOCK[:1, :1, :1, :1].transpose(0, 3),
    "none": BLOCK[:0].transpose(1, 2),
}


def _views(tensor: Any) -> list[bool]:
    """Tell whether it is contiguous, and of each way to put neighbouring dimensions together whether it is a view."""
    found = [tensor.is_contiguous(), tensor.flatten().data_ptr() == tensor.data_ptr()]
    for first in range(tensor.dim()):
        for last in range(first + 1, tensor.dim()):
            found.append(tensor.flatten(first, last).data_ptr() == tensor.data_ptr())
    return found


@pytest.mark.parametrize("name", SHAPES)
def test_what_is_a_view_of_a_tensor_is_a_view_of_what_others_get_and_its_gaps_are_small(name: str) -> None:
    tensor = SHAPES[name]
    made = lay_out(tensor.contiguous(), describe_strides(tensor))
    assert torch.equal(made, tensor)
    assert _views(made) == _views(tensor)
    assert (
        tensor.is_contiguous() or made.untyped_storage().nbytes() <= 3 * max(tensor.numel(), 1) * tensor.element_size()
    )


@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("shape", [(4, 3, 5), (4, 1, 5), (4, 1, 1), (1, 3, 5)])
def test_channels_that_are_last_are_last_for_one_sample_too(samples: int, shape: tuple[int, ...]) -> None:
    tensor = torch.rand(samples, *shape).to(memory_format=torch.channels_last)
    for each in (tensor, tensor[0][None]):
        made = lay_out(each.contiguous(), describe_strides(each))
        assert each.is_contiguous() or made.stride() == each.stride()


def test_batch_normalisation_behind_a_cut_has_the_gradients_of_one_sample_with_channels_last() -> None:
    came = torch.rand(1, 4, 3, 5, dtype=torch.float64).to(memory_format=torch.channels_last)
    back = torch.rand(1, 4, 3, 5, dtype=torch.float64)
    found = []
    for each in (came.clone(), lay_out(came.contiguous(), describe_strides(came))):
        norm = nn.BatchNorm2d(4).double()
        norm(each.requires_grad_()).backward(back)
        found.append((each.grad, norm.weight.grad, norm.bias.grad))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_elements_that_are_one_in_memory_are_sent_as_a_block() -> None:
    assert describe_strides(torch.arange(6.0).as_strided((4, 3), (1, 1))) is None


class InPlace(nn.Module):  # type: ignore[misc]  # torch is not where types are checked
    """Changes what `contiguous` gives: a copy of a transposed tensor, whichever stage made that."""

    def __init__(self, *, learns: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 3)
        self.one.requires_grad_(learns)
        self.double()

    def forward(self, x: Any) -> Any:
        parts = self.one(x).view(-1, 2, 4).transpose(1, 2)
        doubled = parts.contiguous().mul_(2.0)
        return self.two((doubled + parts).flatten(1))


def _squares(output: Any, targets: Any) -> Any:
    return (output - targets[:, :3]).square().mean()


def _train(rank: int) -> list[tuple[float, float, dict[str, Any]]]:
    found = []
    for learns in (True, False):
        with pipeline(
            InPlace(learns=learns),
            X,
            _squares,
            microbatches=4,
            plan=PlanOptions(stage_of={"one": 0, ":transpose": 0, ":contiguous": 1, "two": 1}, costs="counted"),
            engine=EngineOptions(heartbeat=None),
        ) as run:
            loss, again = run.step(X, X).loss, run.evaluate(X, X).loss
            grads = {name: each.grad.clone() for name, each in run.named_parameters() if each.grad is not None}
            found.append((loss, again, grads))
    return found


def test_a_change_in_place_of_a_copy_does_not_reach_what_another_stage_has_sent() -> None:
    said = ranks.run(2, _train)
    for place, learns in enumerate((True, False)):
        model = InPlace(learns=learns)
        loss = _squares(model(X), X)
        loss.backward()
        for one in said:
            assert one[place][:2] == pytest.approx((float(loss), float(loss)))
            for name, each in one[place][2].items():
                torch.testing.assert_close(each, model.get_parameter(name).grad)


def test_who_asks_for_strides_is_with_who_made_the_tensor() -> None:
    class Strided(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 3)

        def forward(self, x: Any) -> Any:
            parts = self.one(x).view(-1, 2, 4).transpose(1, 2)
            return self.two(parts.as_strided((x.shape[0], 4, 2), parts.stride()).flatten(1))

    nodes = {node.name: node.colocate for node in trace_model(Strided(), X.float()).graph.nodes}
    assert nodes[":as_strided"] == nodes["one"] == nodes[":transpose"] == "one"


class Image(nn.Module):  # type: ignore[misc]  # torch is not where types are checked
    """Has its channels last, and a weight that both stages use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)
        self.three = nn.Conv2d(3, 3, 3, padding=1)
        self.three.weight = self.one.weight
        self.to(torch.float64, memory_format=torch.channels_last)

    def forward(self, x: Any) -> Any:
        return self.three(self.two(self.one(x).tanh()).tanh())


class Normed(nn.Module):  # type: ignore[misc]
    """Normalises what has its channels last, and goes on with rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.three = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Linear(64, 3)
        self.to(torch.float64, memory_format=torch.channels_last)

    def forward(self, x: Any) -> Any:
        return self.three(self.two(self.one(x)).flatten(1))


def _train_normed(rank: int) -> dict[str, Any]:
    x, plan = _image(0, 1)[0], PlanOptions(costs="counted", stage_of={"one": 0, "two": 1, "three": 1})
    with pipeline(Normed(), x, _squares, targets=X, microbatches=8, plan=plan) as run:
        run.step(x, X)
        return {name: each.grad.numpy() for name, each in run.named_parameters()}


def test_the_channels_of_a_single_sample_are_last_behind_a_cut_too() -> None:
    """Else torch's batch normalisation on CPUs has wrong gradients."""
    found: dict[str, Any] = {}
    for part in ranks.run(2, _train_normed):
        found |= part
    model, x = Normed(), _image(0, 1)[0]
    for sample, target in zip(x.split(1), X.split(1), strict=True):
        (_squares(model(sample), target) / 8).backward()
    for name, each in model.named_parameters():
        torch.testing.assert_close(torch.from_numpy(found[name]), each.grad)


def _image(replica: int, of: int) -> tuple[Any, Any]:
    x = torch.randn(8, 3, 4, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    rows = slice(replica * 8 // of, (replica + 1) * 8 // of)
    return x[rows], x.roll(1, 3)[rows]


def _distance(output: Any, targets: Any) -> Any:
    return nn.functional.mse_loss(output, targets)


def _double_in_rows(gradient: Any) -> Any:
    return (2 * gradient).contiguous()


def _train_fused(rank: int, replicas: int, hooked: bool) -> dict[str, Any]:
    model, (x, targets) = Image(), _image(0, replicas)
    layout, plan = LayoutOptions(data_parallel=replicas), PlanOptions(costs="counted")
    with pipeline(model, x, _distance, targets=targets, microbatches=2, layout=layout, plan=plan) as run:
        if hooked:
            for each in run.parameters():
                each.register_hook(_double_in_rows)
        optimizer = torch.optim.AdamW(run.groups(), lr=0.1, fused=True)
        for _ in range(3):
            run.step(*_image(run.replica, replicas))
            assert all(each.grad.stride() == each.stride() for each in run.parameters())
            optimizer.step()
        return {name: each.detach().numpy() for name, each in run.named_parameters()}


@pytest.mark.parametrize(("world", "replicas", "hooked"), [(2, 2, False), (2, 1, False), (2, 2, True)])
def test_a_fused_optimizer_finds_each_gradient_where_its_parameter_is(world: int, replicas: int, hooked: bool) -> None:
    found: dict[str, Any] = {}
    for part in ranks.run(world, _train_fused, replicas, hooked):
        found |= part
    model, (x, targets) = Image(), _image(0, 1)
    if hooked:
        for each in model.parameters():
            each.register_hook(_double_in_rows)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    for _ in range(3):
        optimizer.zero_grad()
        _distance(model(x), targets).backward()
        optimizer.step()
    for name, each in model.named_parameters():
        assert torch.allclose(torch.from_numpy(found[name]), each, rtol=1e-6, atol=1e-8), name


class Conjugate(nn.Module):  # type: ignore[misc]
    """Hands on complex numbers that torch has only marked as conjugated, and parts of them that it has marked as
    negative."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(1, 1).double(), nn.Linear(1, 1).double()

    def forward(self, x: Any) -> Any:
        turned = torch.complex(self.one(x), x).conj()
        part = turned.imag
        return self.two(x) * part + (turned * torch.complex(x, x)).real


def _train_conjugate(rank: int) -> dict[str, Any]:
    model, x = Conjugate(), torch.linspace(1, 3, 4, dtype=torch.float64)[:, None]
    plan = PlanOptions(costs="counted", stage_of={"one": 0, ":imag": 0, "two": 1})
    with pipeline(model, x, _distance, targets=x, microbatches=4, schedule="1f1b", plan=plan) as run:
        run.step(x, x)
        return {name: each.grad.numpy() for name, each in run.named_parameters()}


def test_conjugated_and_negative_numbers_are_sent_as_what_they_are() -> None:
    found: dict[str, Any] = {}
    for part in ranks.run(2, _train_conjugate):
        found |= part
    model, x = Conjugate(), torch.linspace(1, 3, 4, dtype=torch.float64)[:, None]
    _distance(model(x), x).backward()
    for name, each in model.named_parameters():
        torch.testing.assert_close(torch.from_numpy(found[name]), each.grad)
