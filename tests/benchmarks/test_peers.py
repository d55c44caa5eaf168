"""The benchmark beside peers: what each is asked for, what is changed of what it ships, and what is shown of it."""

from __future__ import annotations

import io
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml
from rich.console import Console

from benchmarks.barrier import Ear
from benchmarks.peers import at_scale, manifests, on_nodes
from benchmarks.peers.__main__ import NAMES, write_pictures
from benchmarks.peers.comparison import LONGEST_S, Comparison, Sample, make_table, measure_all
from benchmarks.peers.contenders import (
    CONTENDERS,
    EVERSTEP,
    INDEXED_JOB,
    JOB_SET,
    MPI_OPERATOR,
    PATHS,
    TRAINER,
    Contender,
    RankRequest,
)
from benchmarks.peers.install import is_rolled_out, split_by_definition
from benchmarks.peers.worker import COMMAND, IMAGE, NOTICE_SECONDS, WORKER
from e2e.cluster.controlplane_flags import ClientLimits
from everstep_operator.api.load import load_text

PLACEMENT = {"tolerations": [{"key": "kwok.x-k8s.io/node", "operator": "Exists"}], "nodeSelector": {"type": "kwok"}}
REQUEST = RankRequest("some-job", 3, {"TAG": "some-job"}, PLACEMENT, {"nodeSelector": {"a": "b"}})
Object = dict[str, Any]


# -- the same ranks of everyone ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("contender", CONTENDERS, ids=lambda contender: contender.name)
def test_every_contender_runs_the_same_worker_of_the_same_image(contender: Contender) -> None:
    text = repr(contender.objects(REQUEST))
    assert repr(WORKER) in text
    assert repr(IMAGE) in text
    assert "'name': 'WORLD', 'value': '3'" in text
    assert "'name': 'TAG', 'value': 'some-job'" in text
    assert "'cpu': '10m', 'memory': '32Mi'" in text or contender is EVERSTEP  # whose helper sets the same
    assert repr(PLACEMENT["tolerations"]) in text
    assert "{'bench': 'some-job'}" in text


@pytest.mark.parametrize("contender", CONTENDERS, ids=lambda contender: contender.name)
def test_every_object_has_a_path_and_is_deleted(contender: Contender) -> None:
    for body in contender.objects(REQUEST):
        assert body["metadata"]["name"] == "some-job"
        assert body["kind"] in contender.kinds
        assert body["apiVersion"] in PATHS[body["kind"]]


def test_the_training_job_is_one_that_everstep_takes() -> None:
    (job,) = EVERSTEP.objects(REQUEST)
    load_text(yaml.safe_dump(job), "the benchmark's job")
    assert job["spec"]["resources"] == {"requests": {"cpu": "10m", "memory": "32Mi"}}


def test_ranks_find_rank_0_by_the_name_that_each_contender_gives_its_pod() -> None:
    masters = {
        INDEXED_JOB: "some-job-0.some-job",
        JOB_SET: "some-job-ranks-0-0.some-job",
        TRAINER: "some-job-node-0-0.some-job",
        MPI_OPERATOR: "some-job-worker-0.some-job",
    }
    for contender, master in masters.items():
        assert f"'name': 'MASTER_ADDR', 'value': '{master}'" in repr(contender.objects(REQUEST))


def test_a_launcher_is_no_rank_and_has_a_place_of_its_own() -> None:
    (job,) = MPI_OPERATOR.objects(REQUEST)
    replicas = job["spec"]["mpiReplicaSpecs"]
    launcher, worker = replicas["Launcher"]["template"], replicas["Worker"]["template"]
    assert "labels" not in launcher.get("metadata", {})
    assert launcher["spec"]["nodeSelector"] == {"a": "b"}
    assert worker["metadata"]["labels"] == {"bench": "some-job"}
    command = launcher["spec"]["containers"][0]["command"]
    assert command[:3] == ["mpirun", "-n", "3"]
    assert command[-len(COMMAND) :] == COMMAND
    exported = {command[at + 1] for at, word in enumerate(command) if word == "-x"}
    assert {"WORLD", "TAG", "MASTER_ADDR"} <= exported


def test_a_request_is_not_changed_by_what_is_made_from_it() -> None:
    for contender in CONTENDERS:
        first, second = contender.objects(REQUEST), contender.objects(REQUEST)
        assert first == second
    assert REQUEST.placement == PLACEMENT


# -- the worker --------------------------------------------------------------------------------------------------------


@pytest.fixture
def ear() -> Ear:
    return Ear("127.0.0.1")


def start_ranks(ear: Ear, tag: str, name: str) -> list[subprocess.Popen[bytes]]:
    shared = {"WORLD": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    found = []
    for rank in range(2):
        variables = {each["name"]: each["value"] for each in ear.env(tag, **shared, **{name: str(rank)})}
        found.append(subprocess.Popen([sys.executable, *COMMAND[1:]], env=variables))
    return found


def free_port() -> int:
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        return int(door.getsockname()[1])


@pytest.mark.parametrize("name", ["RANK", "JOB_COMPLETION_INDEX", "OMPI_COMM_WORLD_RANK"])
def test_a_rank_that_exits_takes_the_others_along(ear: Ear, name: str) -> None:
    ranks = start_ranks(ear, "exits", name)
    ear.listen("exits", 2)
    ear.say("exits", 1, "exit")
    assert [rank.wait(30) for rank in ranks] == [1, 1]


def test_ranks_that_are_done_end_well(ear: Ear) -> None:
    (first, _) = ranks = start_ranks(ear, "done", "RANK")
    ear.listen("done", 2)
    ear.say("done", 0, "done")
    assert first.wait(30) == 0
    assert [rank.wait(30) for rank in ranks][1] == 1  # it has lost a peer


def test_a_silent_peer_is_lost_after_the_time_of_a_collective() -> None:
    assert "(socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4)" in WORKER
    assert NOTICE_SECONDS == 10 + 5 * 4


# -- what the peers ship -----------------------------------------------------------------------------------------------


def deployment(**container: Any) -> Object:
    template = {"metadata": {"labels": {"a": "b"}}, "spec": {"containers": [{"name": "manager", **container}]}}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "x"}, "spec": {"template": template}}


def test_of_a_peer_only_image_node_and_limits_are_changed() -> None:
    rendered: list[Object] = [
        deployment(image="theirs:v1", args=["--config=/c"]),
        {"kind": "Service", "spec": {"a": 1}},
    ]
    adapted, service = manifests.JOB_SET.adapt(rendered, "node-2")
    assert rendered[0]["spec"]["template"]["spec"]["containers"][0]["image"] == "theirs:v1"
    assert service == rendered[1]
    pod = adapted["spec"]["template"]
    assert pod["spec"]["nodeSelector"] == {"kubernetes.io/hostname": "node-2"}
    [container] = pod["spec"]["containers"]
    assert container["image"] == manifests.JOB_SET.image
    assert container["args"] == ["--config=/c"]
    assert pod["metadata"]["labels"] == {"a": "b"}


def test_other_limits_are_other_pods() -> None:
    limits = ClientLimits(1000, 2000)
    own, raised = (manifests.JOB_SET.adapt([deployment()], "n", each)[0] for each in (None, limits))
    assert own["spec"]["template"]["metadata"] != raised["spec"]["template"]["metadata"]
    [container] = raised["spec"]["template"]["spec"]["containers"]
    assert container["args"] == ["--kube-api-qps=1000", "--kube-api-burst=2000"]


def test_the_queue_of_mpi_operator_is_raised_with_its_client() -> None:
    (found,) = manifests.MPI_OPERATOR.adapt([deployment(args=["-a"])], "n", ClientLimits(7, 8))
    args = found["spec"]["template"]["spec"]["containers"][0]["args"]
    assert args == [
        "-a",
        "--kube-api-qps=7",
        "--kube-api-burst=8",
        "--controller-queue-rate-limit=7",
        "--controller-queue-burst=8",
    ]


def test_the_limits_of_trainer_are_in_its_configuration() -> None:
    file = "controller_manager_config.yaml"
    shipped: Object = {
        "kind": "ConfigMap",
        "data": {file: "clientConnection:\n  qps: 50\n  burst: 100\nwebhook:\n  port: 9443\n"},
    }
    (found,) = manifests.TRAINER.adapt([shipped], "n", ClientLimits(7, 8))
    assert "qps: 7" in found["data"][file]
    assert "port: 9443" in found["data"][file]
    assert "qps: 50" in shipped["data"][file]


def test_what_comes_from_elsewhere_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "overlay" / "kustomization.yaml"
    file.parent.mkdir()
    file.write_text("resources:\n  - ../base\n  - ../../third-party/jobset # Comment this line if …\n")
    file.chmod(0o444)
    manifests.leave_out(tmp_path, "third-party/jobset")
    assert file.read_text() == "resources:\n  - ../base\n"


@pytest.mark.parametrize("peer", manifests.PEERS, ids=lambda peer: peer.folder)
def test_peers_are_pinned(peer: manifests.Peer) -> None:
    assert peer.version.startswith("v")
    assert peer.image.endswith(peer.version)


def test_objects_of_new_kinds_wait_for_their_definition() -> None:
    definition = {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "spec": {"group": "g.io"},
    }
    custom, service = {"apiVersion": "g.io/v1", "kind": "G"}, {"apiVersion": "v1", "kind": "Service"}
    assert split_by_definition([custom, definition, service]) == ([definition, service], [custom])


def test_a_deployment_is_ready_when_only_new_pods_are_left() -> None:
    ready = {"observedGeneration": 2, "replicas": 1, "updatedReplicas": 1, "availableReplicas": 1}
    body: Object = {"metadata": {"generation": 2}, "spec": {"replicas": 1}, "status": ready}
    assert is_rolled_out(body)
    for change in ({"observedGeneration": 1}, {"replicas": 2}, {"availableReplicas": 0}, {"updatedReplicas": 0}):
        assert not is_rolled_out(body | {"status": ready | change})


# -- rows --------------------------------------------------------------------------------------------------------------


def compare(**seconds: float) -> Comparison:
    row = Comparison("start-4", "s", 1.0)
    for contender in CONTENDERS:
        if contender.name.replace("-", "_") in seconds:
            row.add(contender, Sample(seconds[contender.name.replace("-", "_")]))
    return row


def test_the_floor_is_the_fastest_peer() -> None:
    row = compare(everstep=2.0, indexed_job=4.0, jobset=1.0, trainer=3.0)
    assert (row.best_peer, row.floor, row.ratio, row.passed) == ("jobset", 1.0, 2.0, False)
    written = row.as_json()
    assert written["floor"] == 1.0
    assert written["best_peer"] == "jobset"
    assert written["samples"] == {"ours": [2.0], "indexed-job": [4.0], "jobset": [1.0], "trainer": [3.0]}


def test_a_row_in_which_a_peer_wins_is_shown_like_the_others() -> None:
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(make_table([compare(everstep=2.0, jobset=1.0), compare(everstep=1.0, jobset=2.0)]))
    text = console.export_text()
    assert text.count("start-4") == 2
    assert all(contender.title.split()[0] in text for contender in CONTENDERS)


def test_what_was_not_reached_in_time_is_said_so() -> None:
    row = compare(everstep=2.0)
    row.add(MPI_OPERATOR, Sample(LONGEST_S, "812 of 1000 pods"))
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(make_table([row]))
    assert "> 400 (812 of 1000 pods)" in console.export_text()
    assert row.as_json()["unfinished"] == {"mpi-operator": "812 of 1000 pods"}


def test_contenders_alternate_and_a_round_may_only_warm_up() -> None:
    order: list[str] = []

    def measure(contender: Contender) -> Sample:
        order.append(contender.name)
        return Sample(float(len(order)))

    row = measure_all(Comparison("x", "s", 1.0), measure, 2, warm_up=True)
    assert order == [contender.name for contender in CONTENDERS] * 3
    assert row.samples["ours"] == [6.0, 11.0]


def test_names_of_rows_say_their_size() -> None:
    row = at_scale.parse_name("scale-raised-10x100")
    assert row is not None
    assert (row.jobs, row.pods, row.all_pods, row.is_raised) == (10, 100, 1000, True)
    assert [at_scale.parse_name(name) for name in ("scale-0x5", "scale-x", "start-4")] == [None] * 3
    assert all(name in on_nodes.NAMES or at_scale.parse_name(name) for name in NAMES)


def test_pods_belong_to_the_job_whose_name_they_begin_with() -> None:
    pod = {"metadata": {"name": "jobset-1-ranks-0-1-abcde"}}
    assert on_nodes.is_of(pod, "jobset-1")
    assert not on_nodes.is_of(pod, "jobset-11")


# -- pictures ----------------------------------------------------------------------------------------------------------


def test_pictures_show_every_row_and_contender(tmp_path: Path) -> None:
    near = compare(everstep=2.0, indexed_job=4.0, jobset=1.0)
    far = Comparison("scale-1x1000", "s", 1.0)
    far.add(EVERSTEP, Sample(25.0))
    far.add(MPI_OPERATOR, Sample(LONGEST_S, "5 < 1000 pods"))
    nodes, scale = write_pictures([near, far], tmp_path)
    for picture, words in ((nodes, ["start-4", "4 s", "JobSet"]), (scale, ["> 400 s (5 < 1000 pods)", "25 s"])):
        root = ElementTree.fromstring(picture.read_text())
        shown = [each.text for each in root.iter("{http://www.w3.org/2000/svg}text")]
        assert all(word in shown for word in words), shown


def test_no_picture_is_drawn_of_nothing(tmp_path: Path) -> None:
    assert [path.name for path in write_pictures([compare(everstep=1.0)], tmp_path)] == ["peers-nodes.svg"]
