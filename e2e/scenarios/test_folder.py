"""A program that only writes files goes on after its pod is gone: `spec.checkpoint.folder`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.harness import Cluster, WaitTimeoutError, python, training_job, wait
from e2e.stores import PodStore, pod_store
from everstep.checkpoint.publish.folder import restore_folder
from everstep.checkpoint.store.posix import PosixStore

# It knows of no store and of no everstep, and ends at once when it has written its last folder.
WRITES_FILES = """
import json, os, pathlib, time
folder = pathlib.Path('/opt/ml/checkpoints')
files = sorted(folder.glob('step-*/state.json'), key=lambda path: int(path.parent.name[5:]))
step = json.loads(files[-1].read_text())['step'] if files else 0
print('begins at', step, flush=True)
while step < 40:
    step += 1
    time.sleep(0.3)
    if step % 10 == 0 and os.environ['SM_CURRENT_HOST'] == 'algo-1':
        made = folder / f'step-{step}'
        made.mkdir()
        (made / 'state.json').write_text(json.dumps({'step': step}))
        (made / 'weights.bin').write_bytes(bytes(1 << 20))
print('ends at', step, flush=True)
"""
needs_own_cluster = pytest.mark.skipif("KUBECONFIG" in os.environ, reason="its pods may not reach this machine")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PodStore]:
    with pod_store(tmp_path_factory.mktemp("store")) as found:
        yield found


@needs_own_cluster
@pytest.mark.timeout(400)
def test_what_a_program_writes_is_published_and_its_replacement_begins_with_it(
    cluster: Cluster, namespace: str, store: PodStore, tmp_path: Path
) -> None:
    job = training_job(
        "files",
        python(WRITES_FILES),
        image="everstep/trainer:0.1.0",
        numNodes=1,
        numProcPerNode=1,
        distribution={"none": {}},
        checkpoint=store.policy("files", keepLast=100, folder={"quiet": "1s"}),
        resources={"requests": {"cpu": "50m", "memory": "128Mi"}},
    )
    cluster.apply(store.secret(), job, namespace=namespace)
    wait(lambda: bool(list((store.folder / "files" / "manifests").glob("*.json"))), 120, "something is published")
    cluster.kubectl("delete", "pod", "-n", namespace, "files-0", "--grace-period=1", "--wait=false")
    ended = cluster.wait_phase(namespace, "files", "Succeeded", timeout=180)
    assert ended["status"]["restarts"]["infrastructure"] == 1
    (begun,) = re.findall(r"begins at (\d+)", cluster.all_logs(namespace, "files"))
    assert int(begun) >= 10, "the replacement has the files of the pod that is gone"

    def newest(scratch: Path = tmp_path / "newest") -> bool:
        restore_folder(PosixStore(store.folder / "files"), scratch, replace=True)
        return (scratch / "step-40" / "weights.bin").exists()

    try:
        wait(newest, 60, "what the program wrote last is published after its end")
    except WaitTimeoutError as error:
        told = cluster.kubectl("logs", "-n", namespace, "files-0", "-c", "everstep-publish", check=False)
        raise WaitTimeoutError(f"{error}\n{told}\n{cluster.explain(namespace, 'files')}") from None
