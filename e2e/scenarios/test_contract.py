"""Every rank finds its place: rank variables, contract files, names of the other hosts."""

from __future__ import annotations

import json
from typing import Any

import pytest

from e2e.harness import Cluster, python, training_job

TELL = """
import json, os, pathlib
base = pathlib.Path('/opt/ml/input/config')
names = 'RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE NODE_RANK MASTER_ADDR MASTER_PORT'
names += ' SM_CURRENT_HOST SM_HOSTS HOSTNAME'
print('TELL', json.dumps({
    'env': {name: os.environ[name] for name in names.split()},
    'files': {path.name: path.read_text() for path in sorted(base.iterdir())},
    'secrets': sorted(k for k in os.environ if 'TOKEN' in k),
}), flush=True)
"""


def told(output: str) -> list[dict[str, Any]]:
    return [json.loads(line.split("TELL ", 1)[1]) for line in output.splitlines() if "TELL " in line]


# Two sizes at a time, a small one with a large one: each test runs 36 pods, and waits once for all of them.
SIZES = [(1, 8), (4, 5), *(pytest.param(each, marks=pytest.mark.chaos) for each in ((2, 7), (3, 6)))]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: "{} and {} nodes".format(*sizes))
def test_every_rank_knows_its_place(cluster: Cluster, namespace: str, sizes: tuple[int, int]) -> None:
    jobs = {f"place-{nodes}-{procs}": (nodes, procs) for nodes in sizes for procs in range(1, 5)}
    manifests = [
        training_job(name, python(TELL), numNodes=nodes, numProcPerNode=procs) for name, (nodes, procs) in jobs.items()
    ]
    cluster.apply(*manifests, namespace=namespace)
    for name, (nodes, procs) in jobs.items():
        done = cluster.wait_phase(namespace, name, "Succeeded", timeout=120)
        # A second generation would tell everything twice.
        assert done["status"]["restarts"]["total"] == 0, cluster.explain(namespace, name)
        assert_places(cluster, namespace, name, nodes, procs)


def assert_places(cluster: Cluster, namespace: str, name: str, nodes: int, procs: int) -> None:
    logs = cluster.all_logs(namespace, name)
    ranks = told(logs)
    world = nodes * procs
    assert sorted(int(r["env"]["RANK"]) for r in ranks) == list(range(world)), logs
    assert {r["env"]["WORLD_SIZE"] for r in ranks} == {str(world)}
    assert {r["env"]["LOCAL_WORLD_SIZE"] for r in ranks} == {str(procs)}
    assert len({(r["env"]["MASTER_ADDR"], r["env"]["MASTER_PORT"]) for r in ranks}) == 1
    leader = cluster.reported(namespace, name)[0]["status"]["podIP"]
    assert ranks[0]["env"]["MASTER_ADDR"] == leader
    for r in ranks:
        env, rank = r["env"], int(r["env"]["RANK"])
        assert (int(env["NODE_RANK"]), int(env["LOCAL_RANK"])) == divmod(rank, procs)
        assert env["SM_CURRENT_HOST"] == env["HOSTNAME"] == f"algo-{int(env['NODE_RANK']) + 1}"
        assert json.loads(env["SM_HOSTS"]) == sorted(f"algo-{i + 1}" for i in range(nodes))
        assert r["secrets"] == []


def test_contract_files_byte_by_byte(cluster: Cluster, namespace: str) -> None:
    job = training_job("bytes", python(TELL), numNodes=2, hyperparameters={"epochs": "10", "lr": "0.1"})
    cluster.apply(job, namespace=namespace)
    cluster.wait_phase(namespace, "bytes", "Succeeded")
    second = next(r for r in told(cluster.all_logs(namespace, "bytes")) if r["env"]["RANK"] == "1")
    assert second["files"]["hyperparameters.json"] == '{"epochs":"10","lr":"0.1"}'
    resource = json.loads(second["files"]["resourceconfig.json"])
    assert resource["current_host"] == "algo-2"
    assert resource["hosts"] == ["algo-1", "algo-2"]
    assert json.loads(second["files"]["inputdataconfig.json"]) == {}


@pytest.mark.timeout(180)
def test_the_names_of_all_hosts_resolve_in_every_pod(cluster: Cluster, namespace: str) -> None:
    # A name asked for before its pod was known stays unknown for the DNS cache's 30 s: hence the patience.
    source = """
import json, os, socket, time
found = {}
deadline = time.monotonic() + 90
hosts = json.loads(os.environ['SM_HOSTS'])
while len(found) < len(hosts) and time.monotonic() < deadline:
    for host in hosts:
        try:
            found[host] = socket.gethostbyname(host)
        except OSError:
            time.sleep(0.5)
assert len(set(found.values())) == len(hosts), found
print('RESOLVED', json.dumps(found), flush=True)
"""
    cluster.apply(training_job("names", python(source), numNodes=3), namespace=namespace)
    cluster.wait_phase(namespace, "names", "Succeeded", timeout=150)
    expected = {f"algo-{i + 1}": pod["status"]["podIP"] for i, pod in enumerate(cluster.reported(namespace, "names"))}
    output = cluster.all_logs(namespace, "names")
    seen = [json.loads(line.split("RESOLVED ")[1]) for line in output.splitlines() if "RESOLVED " in line]
    assert seen == [expected] * 3


def test_the_failure_file_of_a_script_is_the_message(cluster: Cluster, namespace: str) -> None:
    source = "open('/opt/ml/output/failure', 'w').write('AlgorithmError: bad data'); raise SystemExit(9)"
    cluster.apply(training_job("file", python(source), restart={"application": 0}), namespace=namespace)
    failed = cluster.wait_phase(namespace, "file", "Failed")
    assert failed["status"]["lastFailure"]["exitCode"] == 9
    assert "AlgorithmError: bad data" in failed["status"]["lastFailure"]["message"]
