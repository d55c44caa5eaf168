"""Each Horovod call that the documentation recommends, on two pods of two ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from e2e.harness import Cluster, python, training_job

CALLS = Path(__file__).with_name("horovod_calls.py")
NODES, RANKS_EACH = 2, 2


@pytest.mark.timeout(240)
def test_each_call_that_is_recommended_works_on_all_ranks(cluster: Cluster, namespace: str) -> None:
    job = training_job(
        "calls",
        python(CALLS.read_text()),
        image="docker.io/everstep/trainer-horovod:0.1.0",
        numNodes=NODES,
        numProcPerNode=RANKS_EACH,
        distribution={"horovod": {}},
        restart={"application": 0},
    )
    cluster.apply(job, namespace=namespace)
    cluster.wait_phase(namespace, "calls", "Succeeded", timeout=200)
    assert cluster.all_logs(namespace, "calls").count("EACH-CALL-WORKS") == NODES * RANKS_EACH
