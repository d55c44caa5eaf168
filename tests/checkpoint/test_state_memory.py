"""However a tensor lies in memory, it is saved with its elements and restored into its place, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch._subclasses import FakeTensorMode  # noqa: E402
from torch.testing._internal.two_tensor import TwoTensor  # noqa: E402

import everstep  # noqa: E402
from everstep.checkpoint.errors import CheckpointError  # noqa: E402
from everstep.checkpoint.exchange import importing  # noqa: E402
from everstep.checkpoint.save.tensor_checksums import checksum_tensors  # noqa: E402
from everstep.checkpoint.state.flat import flatten_objects  # noqa: E402
from everstep.checkpoint.state.memory import overlaps_itself  # noqa: E402
from everstep.checkpoint.store.posix import PosixStore  # noqa: E402
from tests.checkpoint import ranks  # noqa: E402
from tests.checkpoint.sessions import session  # noqa: E402

pytestmark = pytest.mark.torch

# Of a source of values: a tensor as it may lie in memory.
LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "contiguous": lambda fill: fill(3, 4),
    "expanded": lambda fill: fill(1, 4).expand(3, 4),
    "expanded scalar": lambda fill: fill().expand(3, 4),
    "expanded twice": lambda fill: fill(1, 4, 1).expand(3, 4, 5),
    "sliding windows": lambda fill: fill(10).as_strided((4, 4), (2, 1)),
    "one place": lambda fill: fill(3).as_strided((2, 2), (0, 0)),
    "every second": lambda fill: fill(3, 8)[:, ::2],
    "transposed": lambda fill: fill(4, 3).t(),
    "channels last": lambda fill: fill(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "within another": lambda fill: fill(30)[5:17].view(3, 4),
    "no elements": lambda fill: fill(0, 4),
    "no elements, expanded": lambda fill: fill(1, 0).expand(3, 0),
    "zero dimensions": lambda fill: fill(),
    "conjugate": lambda fill: torch.complex(fill(3, 4), fill(3, 4)).conj(),
    "negative view": lambda fill: torch.complex(fill(3, 4), fill(3, 4)).conj().imag,
    "bfloat16, transposed": lambda fill: fill(4, 3).bfloat16().t(),
}


def made(layout: str, seed: int | None) -> Any:
    generator = torch.Generator().manual_seed(seed or 0)

    def fill(*shape: int) -> Any:
        return torch.zeros(shape) if seed is None else torch.rand(shape, generator=generator)

    return LAYOUTS[layout](fill)


def holder(where: str, tensor: Any) -> dict[str, Any]:
    """The tensor in one of the places where a run keeps tensors."""
    if where in ("buffer", "parameter"):
        module = nn.Module()
        if where == "buffer":
            module.register_buffer("it", tensor)
        else:
            module.it = nn.Parameter(tensor, requires_grad=tensor.is_floating_point())
        return {"model": module}
    if where == "optimizer":
        module = nn.Module()
        module.it = nn.Parameter(torch.zeros(tensor.shape))
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        optimizer.state[module.it]["momentum_buffer"] = tensor
        return {"model": module, "optimizer": optimizer}
    return {"it": tensor} if where == "alone" else {"state": {"it": tensor, "nested": [tensor]}}


def found(where: str, objects: dict[str, Any]) -> Any:
    if where in ("buffer", "parameter"):
        return objects["model"].it.detach()
    if where == "optimizer":
        return objects["optimizer"].state[objects["model"].it]["momentum_buffer"]
    return objects["it"] if where == "alone" else objects["state"]["it"]


@pytest.mark.parametrize("where", ["buffer", "parameter", "alone", "nested", "optimizer"])
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_a_tensor_comes_back_however_it_lies_in_memory(tmp_path: Path, layout: str, where: str) -> None:
    before = holder(where, made(layout, seed=1))
    ranks.save(PosixStore(tmp_path / "store"), ranks.key(10), before)
    after = holder(where, made(layout, seed=None))
    place = found(where, after).data_ptr()
    ranks.restore(tmp_path / "store", tmp_path / "memory", after)
    assert torch.equal(found(where, after), found(where, before))
    if where in ("buffer", "parameter", "alone"):
        assert found(where, after).data_ptr() == place, "it is restored in its place"
        assert found(where, after).stride() == made(layout, seed=1).stride()


def test_values_that_differ_do_not_fit_elements_that_share_memory(tmp_path: Path) -> None:
    ranks.save(PosixStore(tmp_path / "store"), ranks.key(10), {"it": torch.arange(12.0).view(3, 4)})
    for layout in ("expanded", "sliding windows"):
        it = made(layout, seed=2)[:3]
        kept = it.clone()
        with pytest.raises(CheckpointError, match=r"it: elements that share memory here have different values"):
            ranks.restore(tmp_path / "store", tmp_path / "memory", {"it": it})
        assert torch.equal(it, kept)


def test_overlap_is_known_from_shape_and_strides() -> None:
    shared = {"expanded", "expanded scalar", "expanded twice", "sliding windows", "one place"}
    assert {layout for layout in LAYOUTS if overlaps_itself(made(layout, seed=1))} == shared


def without_memory() -> dict[str, Any]:
    with torch.device("meta"):
        on_meta = nn.Linear(2, 2)
    with FakeTensorMode():
        fake = nn.Linear(2, 2)
    freed = nn.Linear(2, 2)
    freed.weight.untyped_storage().resize_(0)
    return {"meta": on_meta, "fake": fake, "lazy": nn.LazyLinear(2), "freed": freed}


@pytest.mark.parametrize(
    ("kind", "advice"),
    [
        ("meta", r"model\.weight is on the meta device: give it memory first"),
        ("fake", r"model\.weight is a fake tensor"),
        ("lazy", r"model\.weight is a parameter of a lazy module and has no shape yet: run the module once"),
        ("freed", r"model\.weight has no memory now"),
    ],
)
def test_a_tensor_without_memory_is_refused_when_the_run_begins(folder: Path, kind: str, advice: str) -> None:
    with session(folder) as ckpt:
        with pytest.raises(CheckpointError, match=advice):
            ckpt.restore(model=without_memory()[kind])
        with pytest.raises(CheckpointError, match=advice):
            ckpt.track(model=without_memory()[kind])
    with session(folder) as ckpt:
        ckpt.track(model=nn.Linear(2, 2))
        ckpt.save(1)
    with session(folder) as ckpt, pytest.raises(CheckpointError, match=advice):
        ckpt.restore(model=without_memory()[kind])


@pytest.mark.parametrize(
    ("tensor", "advice"),
    [
        (
            torch.zeros(2, dtype=torch.uint8).view(torch.uint4),
            r"is of the type torch\.uint4, which no checkpoint holds",
        ),
        (torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]), "is a nested tensor; save its parts"),
    ],
)
def test_a_tensor_that_no_checkpoint_holds_is_refused_when_the_run_begins(
    folder: Path, tensor: Any, advice: str
) -> None:
    with session(folder) as ckpt, pytest.raises(CheckpointError, match=rf"^state\.it {advice}"):
        ckpt.restore(state={"it": tensor})


class OfAdapter(nn.Module):  # type: ignore[misc]
    """A module whose state is its adapter's: what it holds besides is there already, in memory of any kind."""

    def __init__(self, base: Any, is_parameter: bool) -> None:
        super().__init__()
        self.adapter = nn.Linear(2, 2)
        if is_parameter:
            self.base = nn.Parameter(base, requires_grad=False)
        else:
            self.register_buffer("base", base, persistent=False)

    def state_dict(self, *args: Any, **options: Any) -> Any:
        state = super().state_dict(*args, **options)
        state.pop("base", None)
        return state


@pytest.mark.parametrize("is_parameter", [False, True], ids=["buffer", "parameter"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.eye(3).to_sparse_csr(),
        lambda: torch.ones(3).to_mkldnn(),
        lambda: TwoTensor(torch.ones(3), torch.ones(3)),
    ],
    ids=["coo", "csr", "mkldnn", "wrapper"],
)
def test_what_a_module_holds_and_does_not_save_may_be_in_memory_of_any_kind(
    tmp_path: Path, make: Any, is_parameter: bool
) -> None:
    saved, model, read = (OfAdapter(make(), is_parameter) for _ in range(3))
    ranks.save(PosixStore(tmp_path / "store"), ranks.key(10), {"model": saved})
    ranks.restore(tmp_path / "store", tmp_path / "memory", {"model": model})
    everstep.load_into(tmp_path / "store", model=read)
    for each in (model, read):
        assert torch.equal(each.adapter.weight, saved.adapter.weight)
        assert each.base.layout == saved.base.layout


def test_a_tensor_without_memory_is_refused_by_name_among_many() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].to("meta")
    with pytest.raises(CheckpointError, match=r"model\.1\.weight is on the meta device"):
        flatten_objects({"model": model}, rank=0)


class Labelled(torch.Tensor):  # type: ignore[misc,name-defined,unused-ignore]
    """A class of a script, of which a checkpoint records nothing."""


def test_a_tensor_of_a_scripts_own_class_keeps_it_where_it_is_held_and_is_told_of_otherwise(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with session(folder) as ckpt:
        ckpt.track(state={"label": torch.arange(3.0).as_subclass(Labelled)}, model=nn.Linear(2, 2))
        ckpt.save(1)
    told = [record.getMessage() for record in caplog.records if "not its class" in record.getMessage()]
    assert len(told) == 1
    assert told[0].startswith("state.label is a Labelled: its elements are saved, not its class. It is restored as a")

    held: dict[str, Any] = {"label": torch.zeros(3).as_subclass(Labelled)}
    empty: dict[str, Any] = {}
    for state in (held, empty):
        with session(folder) as ckpt:
            ckpt.restore(state=state, model=nn.Linear(2, 2))
    assert [type(state["label"]) for state in (held, empty)] == [Labelled, torch.Tensor]
    assert all(state["label"].tolist() == [0.0, 1.0, 2.0] for state in (held, empty))


def test_parameters_of_a_scripts_own_class_are_restored_without_a_warning(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class OwnParameter(nn.Parameter):  # type: ignore[misc,unused-ignore]
        pass

    def make_model(value: float) -> nn.Module:
        model = nn.Linear(2, 2)
        model.weight = OwnParameter(torch.full((2, 2), value))
        return model

    with session(folder) as ckpt:
        ckpt.track(model=make_model(5.0))
        ckpt.save(1)
    with session(folder) as ckpt:
        ckpt.restore(model=(model := make_model(0.0)))
    assert type(model.weight) is OwnParameter
    assert model.weight.tolist() == [[5.0, 5.0], [5.0, 5.0]]
    assert not [record for record in caplog.records if "not its class" in record.getMessage()]


class Rotating(torch.optim.Optimizer):  # type: ignore[misc,name-defined]
    """Moves along a rotated gradient; the rotation is a factor of the gradients' sum, and lies by columns."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: Any = None) -> None:
        for param in (each for group in self.param_groups for each in group["params"]):
            own = self.state[param]
            rotation = own.get("rotation", torch.eye(len(param)))
            own["nested"] = [torch.linalg.qr(rotation @ param.grad @ param.grad.T)[0]]
            own["rotation"] = torch.linalg.qr(rotation + param.grad @ param.grad.T)[0]
            param.sub_(own["nested"][0] @ own["rotation"] @ param.grad, alpha=0.1)


def train_rotating(folder: Path, last: int, wrap: Callable[[Any], Any]) -> tuple[list[Any], list[Any]]:
    """Returns the weights, and how the state lies in memory."""
    torch.manual_seed(3)
    model = nn.Linear(24, 24, bias=False)
    optimizer = Rotating(model.parameters())
    with session(folder) as ckpt:
        start = ckpt.restore(model=model, optimizer=wrap(optimizer))
        lies = [each.stride() for each in optimizer.state[model.weight].get("nested", ())]
        for step in range(start.step, last):
            optimizer.zero_grad()
            x = torch.randn(8, 24, generator=torch.Generator().manual_seed(step))
            model(x).square().mean().backward()
            optimizer.step()
        ckpt.save(last)
    return model.weight.tolist(), lies


@pytest.mark.parametrize("wrap", [lambda each: each, everstep.PerRank], ids=["of all ranks", "of each rank"])
def test_an_optimizer_whose_state_lies_by_columns_goes_on_bit_for_bit(tmp_path: Path, wrap: Any) -> None:
    straight, _ = train_rotating(tmp_path / "straight", 6, wrap)
    train_rotating(tmp_path / "resumed", 3, wrap)
    resumed, lies = train_rotating(tmp_path / "resumed", 6, wrap)
    assert lies == [(1, 24)]
    assert resumed == straight


@pytest.mark.parametrize("wrap", [lambda each: each, everstep.PerRank], ids=["of all ranks", "of each rank"])
def test_state_that_an_optimizer_has_as_its_parameter_lies_as_that_does_now(tmp_path: Path, wrap: Any) -> None:
    """Fused steps go through both by the addresses."""

    def begin(memory_format: Any) -> Any:
        conv = nn.Conv2d(3, 4, 3).to(memory_format=memory_format)
        return conv, torch.optim.AdamW(conv.parameters(), fused=True)

    conv, optimizer = begin(torch.channels_last)
    conv(torch.ones(1, 3, 4, 4)).sum().backward()
    optimizer.step()
    with session(tmp_path) as ckpt:
        ckpt.track(model=conv, optimizer=wrap(optimizer))
        ckpt.save(1)
    for memory_format in (torch.channels_last, torch.contiguous_format):
        again, other = begin(memory_format)
        with session(tmp_path) as ckpt:
            ckpt.restore(model=again, optimizer=wrap(other))
        average = other.state[again.weight]["exp_avg"]
        assert torch.equal(average, optimizer.state[conv.weight]["exp_avg"])
        assert average.stride() == again.weight.stride()


def test_a_tensor_of_one_element_may_have_any_stride(tmp_path: Path) -> None:
    """As the column of a table of one row has: torch calls it contiguous, and views it not as bytes."""

    def make_model(value: float) -> nn.Module:
        model = nn.Module()
        model.register_buffer("column", torch.full((1, 4), value)[:, 0])
        return model

    with session(tmp_path) as ckpt:
        ckpt.track(model=(saved := make_model(3.0)))
        ckpt.save(1)
    everstep.load_into(tmp_path / "store", model=(loaded := make_model(0.0)))
    torch.save({"model": saved.state_dict()}, tmp_path / "file.pt")
    importing.import_torch(tmp_path / "file.pt", tmp_path / "imported")
    assert loaded.column.tolist() == everstep.load(tmp_path / "imported")["model"]["column"].tolist() == [3.0]
    assert checksum_tensors([saved.column]) == checksum_tensors([torch.tensor([3.0])])
