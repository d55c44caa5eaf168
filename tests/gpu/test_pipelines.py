"""Pipelines whose processes share a GPU, over gloo, or have one each, over NCCL: they train as one process does."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import torch

from tests.gpu.pipelined import PipelinedRun, run_ranks
from tests.gpu.processes import start_ranks
from tests.gpu.trainings import KIND, devices

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
cuda_only = pytest.mark.cuda_only

RUNS = [
    PipelinedRun("simple", costs="measured"),
    PipelinedRun("1f1b", dropout=0.2, engine={"recompute": True}),
    PipelinedRun("zb-h1", dropout=0.2, engine={"clip": 0.5}),
    PipelinedRun("interleaved", stages=4, dropout=0.2),
    PipelinedRun("zb-interleaved", stages=4, dropout=0.2, costs="measured"),
    PipelinedRun("1f1b", dropout=0.2, engine={"offload": frozenset({0})}),
    PipelinedRun("1f1b", dtype=torch.float32, engine={"precision": "bf16"}),
    PipelinedRun("1f1b", dtype=torch.float32, compiles=True, engine={"recompute": True}),
]
REPLICATED = [
    PipelinedRun("1f1b", replicas=2, dropout=0.2, engine={"bucket": 1000, "clip": 0.5}),
    PipelinedRun("zb-h1", replicas=2, dtype=torch.bfloat16, engine={"fp32_gradients": True}),
]


if KIND == "cpu":  # the tests themselves are tried: every schedule on processors is test_transparency_gloo's
    RUNS, REPLICATED = RUNS[1:3], REPLICATED[:1]


def spawn(
    folder: Path, runs: Sequence[PipelinedRun], backend: str, places: Sequence[int]
) -> list[list[dict[str, Any]]]:
    """Run all of it on so many processes; what each told, by rank and run."""
    folder.mkdir(parents=True)
    start_ranks(run_ranks, (list(runs), backend, str(folder), list(places)), len(places))
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(len(places))]


def alone(folder: Path, runs: Sequence[PipelinedRun]) -> list[dict[str, Any]]:
    """One process and one stage, in as many micro-batches: those that several replicas have in all."""
    one = [replace(run, schedule="simple", stages=1, replicas=1, microbatches=4 * run.replicas) for run in runs]
    return spawn(folder, one, "gloo", [0])[0]


def check(
    runs: Sequence[PipelinedRun], meant: Sequence[dict[str, Any]], ranks: Sequence[Sequence[dict[str, Any]]]
) -> None:
    for number, run in enumerate(runs):
        near = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.05}[run.dtype]
        near = max(near, 0.02 if "precision" in run.engine else 0.0)
        weights: dict[str, torch.Tensor] = {}
        for told in ranks:
            assert told[number]["places"] == {KIND}
            for mine, theirs in zip(told[number]["losses"], meant[number]["losses"], strict=True):
                assert math.isclose(mine, theirs, rel_tol=near), (run, mine, theirs)
            for name, value in told[number]["weights"].items():
                assert torch.equal(weights.setdefault(name, value), value), f"copies of {name} differ"
        assert weights.keys() == meant[number]["weights"].keys()
        for name, value in meant[number]["weights"].items():
            assert float((weights[name] - value).abs().max()) <= near, (run, name)


def trained_alike(folder: Path, runs: Sequence[PipelinedRun], backend: str, places: Sequence[int]) -> None:
    check(runs, alone(folder / "alone", runs), spawn(folder / "ranks", runs, backend, places))


def test_processes_on_one_gpu_train_as_one_process_does(tmp_path: Path) -> None:
    trained_alike(tmp_path, RUNS, "gloo", [0, 0])


def test_replicas_on_one_gpu_train_as_one_process_does(tmp_path: Path) -> None:
    trained_alike(tmp_path, REPLICATED, "gloo", [0, 0, 0, 0])


@cuda_only
def test_processes_whose_group_has_nccl_share_a_gpu_all_the_same(tmp_path: Path) -> None:
    """NCCL refuses that: their tensors go by gloo."""
    trained_alike(tmp_path, RUNS[:2], "cpu:gloo,cuda:nccl", [0, 0])


@cuda_only
def test_one_process_with_nccl_trains(tmp_path: Path) -> None:
    runs = [replace(run, stages=1, schedule="simple") for run in RUNS[:2]]
    trained_alike(tmp_path, runs, "nccl", [0])


@cuda_only
def test_processes_with_a_gpu_each_train_over_nccl(tmp_path: Path) -> None:
    if len(devices()) < 2:
        pytest.skip("this machine has one GPU: pipelines over NCCL were not tried")
    trained_alike(tmp_path, RUNS, "nccl", [0, 1])
    if len(devices()) >= 4:
        trained_alike(tmp_path / "replicas", REPLICATED, "nccl", [0, 1, 2, 3])
