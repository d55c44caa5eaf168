"""A model that no pipeline can train is refused at the call, with the module's name, the reason and what to do."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor import DTensor, Replicate  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from everstep.pipeline import EngineOptions, LayoutOptions, PlanOptions, pipeline  # noqa: E402
from everstep.pipeline.errors import PipelineError  # noqa: E402
from everstep.pipeline.unsupported import refuse_unsupported  # noqa: E402
from tests.checkpoint import ranks  # noqa: E402
from tests.pipeline.models import squares  # noqa: E402

pytestmark = pytest.mark.torch

X = torch.ones(4, 4)


def chain(module: Any) -> Any:
    return nn.Sequential(nn.Linear(4, 4), module, nn.Linear(4, 4))


class Words(nn.Module):  # type: ignore[misc]  # torch is not where types are checked
    def __init__(self, table: Any) -> None:
        super().__init__()
        self.table = table

    def forward(self, x: Any) -> Any:
        return self.table(x.long().clamp(0, 3)).sum(1)


class Scaled(nn.Module):  # type: ignore[misc]  # torch is not where types are checked
    def __init__(self, *, learns: bool) -> None:
        super().__init__()
        scale = torch.ones(1).expand(4)
        if learns:
            self.scale = nn.Parameter(scale)
        else:
            self.register_buffer("scale", scale)

    def forward(self, x: Any) -> Any:
        return x * self.scale


def _refused(rank: int) -> list[str]:
    mesh = init_device_mesh("cpu", (2,))
    spread = nn.Linear(4, 4)
    spread.weight = nn.Parameter(DTensor.from_local(spread.weight.data, mesh, [Replicate()]))
    told = []
    for model in (
        chain(nn.SyncBatchNorm(4)),
        chain(fully_shard(nn.Linear(4, 4), mesh=mesh)),
        chain(DistributedDataParallel(nn.Linear(4, 4))),
        chain(spread),
        chain(Words(nn.Embedding(4, 4, sparse=True))),
        chain(Words(nn.EmbeddingBag(4, 4, sparse=True))),
        chain(Scaled(learns=True)),
        chain(Scaled(learns=False)),
    ):
        with pytest.raises(PipelineError) as caught:
            pipeline(model, X, squares, plan=PlanOptions(costs="counted"), engine=EngineOptions(heartbeat=None))
        told.append(str(caught.value))
    return told


def _changed(rank: int) -> list[str]:
    mesh, told = init_device_mesh("cpu", (2,)), []
    for change in (
        lambda module: fully_shard(module, mesh=mesh),
        nn.utils.parametrizations.weight_norm,
        lambda module: module.register_parameter("adapter", nn.Parameter(torch.zeros(4, 4))),
        lambda module: module.register_parameter("constant", nn.Parameter(torch.zeros(4, 4), requires_grad=False)),
    ):
        with pipeline(
            chain(nn.Tanh()),
            X,
            squares,
            stages=1,
            layout=LayoutOptions(data_parallel=2),
            plan=PlanOptions(costs="counted", check=False),
            engine=EngineOptions(heartbeat=None),
        ) as run:
            run.step(X, X)
            change(run.get_submodule("2"))
            try:
                run.step(X, X)
            except PipelineError as error:
                told.append(str(error))
    return told


def test_parameters_that_a_model_gets_after_pipeline_are_refused_if_they_learn() -> None:
    for sharded, normed, adapted in ranks.run(2, _changed):
        assert "parameter '2.weight' was added, or put in another's place, after pipeline() was called" in sharded
        assert "there is no FSDP within a stage" in sharded
        assert "parameter '2.parametrizations.weight.original0' was added" in normed
        assert "parameter '2.adapter' was added" in adapted


def test_what_cannot_be_trained_is_refused_on_all_ranks_with_what_to_do() -> None:
    here, there = ranks.run(2, _refused)
    assert here == there
    batch, sharded, replicated, spread, sparse, bag, parameter, buffer = here
    assert batch.startswith("module '1' is a SyncBatchNorm, ")
    assert "build the model with BatchNorm1d, BatchNorm2d or BatchNorm3d" in batch
    assert sharded.startswith("module '1' is sharded by fully_shard (FSDP2), ")
    assert "ShardedOptimizer" in sharded
    assert replicated.startswith("module '1' is a DistributedDataParallel, ")
    assert "give the module that is in it" in replicated
    assert spread.startswith("parameter '1.weight' is a DTensor, ")
    assert sparse.startswith("module '1.table' is an Embedding with sparse=True, ")
    assert bag.startswith("module '1.table' is an EmbeddingBag with sparse=True, ")
    assert "sparse=False" in sparse
    assert parameter.startswith("parameter '1.scale' of shape (4,) was expanded: ")
    assert buffer.startswith("buffer '1.scale' of shape (4,) was expanded: ")
    assert ".clone()" in buffer


def test_what_only_looks_alike_is_not_refused() -> None:
    columns = nn.Linear(4, 4)
    columns.register_buffer("positions", torch.arange(4).expand(1, -1))  # each element has memory of its own
    columns.register_buffer("none", torch.ones(1).expand(0))
    columns.weight = nn.Parameter(columns.weight.data.t())
    columns.register_buffer("neighbours", torch.eye(4).to_sparse())
    refuse_unsupported(nn.Sequential(columns, nn.BatchNorm1d(4), nn.Embedding(4, 4)))
    refuse_unsupported(nn.Embedding(4, 4, sparse=True).requires_grad_(False))  # it has no gradient of any form
    with torch.device("meta"):
        refuse_unsupported(nn.Linear(4, 4))


def test_a_lazy_module_is_refused_with_what_to_do() -> None:
    with pytest.raises(PipelineError, match=r"parameter '0\.weight' has no shape yet.*call the model once"):
        refuse_unsupported(nn.Sequential(nn.LazyLinear(4)))


def _give_lazy_model(rank: int) -> str:
    with pytest.raises(PipelineError) as error:
        pipeline(nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(4)), X, lambda output, targets: output.sum())
    return str(error.value)


def test_a_pipeline_of_a_lazy_module_is_refused_before_anything_asks_for_its_shapes() -> None:
    for message in ranks.run(2, _give_lazy_model):
        assert "parameter '1.weight' has no shape yet" in message


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_script_module_within_a_model_is_refused_with_its_name() -> None:
    for make in (torch.jit.script, lambda module: torch.jit.trace(module, X)):
        with pytest.raises(PipelineError, match=r"module '1' is a ScriptModule .*give the module that it was made of"):
            refuse_unsupported(chain(make(nn.Linear(4, 4))))
