"""Every example in the repository, applied as it is, reaches the result that its README names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.harness import Cluster, Object

EXAMPLES = Path(__file__).parents[2] / "examples"


def manifest(path: str) -> Object:
    loaded: dict[str, Any] = yaml.safe_load((EXAMPLES / path).read_text())
    return loaded


def run(cluster: Cluster, namespace: str, path: str, timeout: float = 120) -> str:
    """Apply an example's manifest unchanged, wait for its success; every rank's output."""
    job = manifest(path)
    name = job["metadata"]["name"]
    cluster.kubectl("apply", "-n", namespace, "-f", str(EXAMPLES / path))
    cluster.wait_phase(namespace, name, "Succeeded", timeout=timeout)
    return cluster.all_logs(namespace, name)


def accuracy(output: str) -> float:
    found = re.findall(r"accuracy (0\.\d+|1\.0+)", output)
    assert len(found) == 1, f"one rank prints the accuracy once, not {found}"
    return float(found[0])


@pytest.mark.timeout(180)
@pytest.mark.parametrize("path", ["digits/trainingjob.yaml", "digits/trainingjob-horovod.yaml"])
def test_digits_are_learned_by_two_nodes_of_two_ranks(cluster: Cluster, namespace: str, path: str) -> None:
    output = run(cluster, namespace, path)
    assert accuracy(output) >= 0.95
    assert {f"[rank {rank}]" for rank in range(4)} <= set(re.findall(r"\[rank \d+\]", output))
    nodes = {pod["spec"]["nodeName"] for pod in cluster.pods(namespace, manifest(path)["metadata"]["name"])}
    assert len(nodes) == 2, "the two pods of the example run on two nodes"


@pytest.mark.timeout(240)
def test_char_lm_learns_python(cluster: Cluster, namespace: str) -> None:
    output = run(cluster, namespace, "char-lm/trainingjob.yaml", timeout=200)
    bits = float(re.findall(r"bits per character (\d+\.\d+)", output)[-1])
    assert bits < 4.0, "an untrained model of bytes is at about 6.6"


@pytest.mark.timeout(360)
def test_a_model_in_four_stages_on_two_replicas_learns_python(cluster: Cluster, namespace: str) -> None:
    output = run(cluster, namespace, "pipeline-lm/trainingjob.yaml", timeout=330)
    held = set(re.findall(r"rank (\d): .*begins at step 0", output))
    assert held == {str(rank) for rank in range(8)}, output
    bits = float(re.findall(r"bits per character (\d+\.\d+)", output)[-1])
    assert bits < 5.5, "an untrained model of bytes is at about 6.6"


@pytest.mark.timeout(120)
@pytest.mark.parametrize("path", ["mpi-hello/trainingjob.yaml", "mpi-hello/trainingjob-c.yaml"])
def test_mpi_programs_in_python_and_c(cluster: Cluster, namespace: str, path: str) -> None:
    output = run(cluster, namespace, path, timeout=90)
    for rank in range(4):
        assert re.search(rf"rank {rank} of 4", output), output


@pytest.mark.timeout(90)
def test_a_bare_python_image_talks_over_sockets(cluster: Cluster, namespace: str) -> None:
    output = run(cluster, namespace, "byo/trainingjob.yaml", timeout=60)
    assert "sum" in output


@pytest.mark.timeout(120)
def test_an_unmodified_torchrun_inside_each_pod(cluster: Cluster, namespace: str) -> None:
    output = run(cluster, namespace, "torchrun/trainingjob.yaml", timeout=100)
    assert "world size 4" in output
