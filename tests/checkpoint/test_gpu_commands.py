"""`make test-gpu` and `make bench-gpu` are tried on a processor, so that neither stops working where no GPU is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

pytest.importorskip("torch")

pytestmark = [pytest.mark.torch, pytest.mark.timeout(1000)]

ROOT = Path(__file__).parents[2]
PATIENCE = 900.0  # for what takes half a minute where nothing else runs


def run_module(folder: Path, *arguments: str) -> None:
    """Run a module of this repository in a folder of its own, where it leaves its results."""
    found = [str(ROOT), str(ROOT / "trainer-image" / "src"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, found))}
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_tests_for_gpus_pass_on_a_processor(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    run_module(tmp_path, "tests.gpu", "--on-cpu", "--junitxml", str(report), "--basetemp", str(tmp_path / "of tests"))
    cases = list(ET.parse(report).getroot().iter("testcase"))
    bad = [case.get("name") for case in cases if any(child.tag in ("failure", "error", "skipped") for child in case)]
    ran = {str(case.get("name")).partition("[")[0] for case in cases}
    assert bad == []
    assert ran >= {
        "test_what_is_saved_while_training_goes_on_is_restored_bit_for_bit",
        "test_large_states_are_saved_one_after_the_other",
        "test_several_processes_on_one_gpu_over_gloo",
        "test_processes_on_one_gpu_train_as_one_process_does",
        "test_replicas_on_one_gpu_train_as_one_process_does",
        "test_a_job_on_all_gpus_that_crashes_goes_on_where_it_was",
    }


@pytest.mark.chaos
def test_the_benchmark_for_gpus_measures_all_rows_on_a_processor(tmp_path: Path) -> None:
    run_module(tmp_path, "benchmarks.gpu", "--device", "cpu", "--size", "1000000", "--folder", str(tmp_path / "stores"))
    rows = json.loads((tmp_path / "build" / "bench" / "gpu.json").read_text())
    assert [row["name"] for row in rows] == [
        "stall-copy",
        "stall-torch-save",
        "train-cost-short-steps",
        "train-cost-long-steps",
        "restore",
        "pipeline-step",
    ]
    assert all(row["samples"]["ours"] and row["samples"]["floor"] for row in rows)
