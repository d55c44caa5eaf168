"""The pods of a job, and the fields that a template may not set."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from everstep.agent.config import AgentPaths
from everstep_operator.plan import plain_mode, template
from everstep_operator.plan.frozen_template import FrozenTemplate
from everstep_operator.plan.plan_settings import PlanSettings
from everstep_operator.plan.template import RejectedTemplate, resolve_template
from tests.builders import JobBuilder, job, pool


def resolved(builder: JobBuilder, *, pool_: Any = None, plain: bool = False, **settings: Any) -> FrozenTemplate:
    made = resolve_template(builder.build(), epoch=1, pool=pool_, plain=plain, settings=PlanSettings(**settings))
    assert isinstance(made, FrozenTemplate), made
    return made


def trainer(frozen: FrozenTemplate) -> dict[str, Any]:
    found: dict[str, Any] = next(c for c in frozen.pod["spec"]["containers"] if c["name"] == "trainer")
    return found


def mounts(frozen: FrozenTemplate) -> dict[str, str]:
    return {m["mountPath"]: m["name"] for m in trainer(frozen)["volumeMounts"]}


def test_the_agent_runs_the_ranks_of_the_users_image() -> None:
    frozen = resolved(job())
    assert trainer(frozen)["command"] == ["python3", "-I", "-S", "-B", "/opt/everstep/agent/agent.pyz", "run"]
    assert frozen.job["command"] == ["python", "train.py"]
    assert "/opt/ml" not in mounts(frozen), "it would hide the image's own /opt/ml/code"
    assert {f"/opt/ml/{name}" for name in ("input", "model", "output", "checkpoints")} < mounts(frozen).keys()


def test_node_autoscalers_are_asked_to_leave_the_pods_alone_unless_the_template_says_otherwise() -> None:
    safe, disrupt = "cluster-autoscaler.kubernetes.io/safe-to-evict", "karpenter.sh/do-not-disrupt"
    assert resolved(job()).pod["metadata"]["annotations"] == {safe: "false", disrupt: "true"}
    assert resolved(job().plain(), plain=True).pod["metadata"]["annotations"][safe] == "false"
    over = job().spec(podTemplate={"metadata": {"annotations": {disrupt: "false", "mine": "yes"}}})
    assert resolved(over).pod["metadata"]["annotations"] == {safe: "false", disrupt: "false", "mine": "yes"}
    assert resolved(job(), pod_annotations={}).pod["metadata"]["annotations"] == {}


def test_the_default_is_the_restricted_profile() -> None:
    spec = resolved(job()).pod["spec"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert trainer(resolved(job()))["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }
    assert spec["automountServiceAccountToken"] is False


def test_the_image_profile_leaves_the_user_to_the_image() -> None:
    frozen = resolved(job().spec(securityProfile="image"))
    assert frozen.pod["spec"]["securityContext"].keys() == {"fsGroup", "fsGroupChangePolicy"}
    assert "securityContext" not in trainer(frozen)


def test_the_pool_says_where() -> None:
    chosen = pool("a100").spec(tolerations=[{"key": "gpu", "operator": "Exists"}], gpuResource="amd.com/gpu").build()
    frozen = resolved(job().gpus(4), pool_=chosen)
    assert frozen.pod["spec"]["nodeSelector"] == {"pool": "a100"}
    assert {"key": "gpu", "operator": "Exists"} in frozen.pod["spec"]["tolerations"]
    assert trainer(frozen)["resources"]["limits"] == {"amd.com/gpu": "4"}
    assert frozen.job["numProcPerNode"] == 4


def test_cpus_are_those_requested_where_only_gpus_are_limited() -> None:
    """A program that runs without the agent is told the number in SM_NUM_CPUS."""
    assert resolved(job().plain().gpus(1).resources(requests={"cpu": "8"}), plain=True).job["cpus"] == 8
    both = job().plain().resources(requests={"cpu": "2"}, limits={"cpu": "3500m"})
    assert resolved(both, plain=True).job["cpus"] == 4


def test_pods_outlast_the_restart_of_a_kubelet_or_of_its_network() -> None:
    tolerations = resolved(job()).pod["spec"]["tolerations"]
    assert {t["key"]: t["tolerationSeconds"] for t in tolerations} == {
        "node.kubernetes.io/not-ready": 300,
        "node.kubernetes.io/unreachable": 300,
    }


def test_the_overlay_is_merged_by_name() -> None:
    sidecar = {"name": "logs", "image": "example.com/logs:1"}
    over = {
        "containers": [{"name": "trainer", "volumeMounts": [{"name": "data", "mountPath": "/data"}]}, sidecar],
        "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "d"}}],
        "tolerations": [{"key": "x", "operator": "Exists"}],
        "schedulerName": "volcano",
    }
    frozen = resolved(job().pod(**over))
    spec = frozen.pod["spec"]
    assert mounts(frozen)["/data"] == "data"
    assert mounts(frozen)["/opt/everstep/agent"] == "everstep-agent"
    assert [c["name"] for c in spec["containers"]] == ["trainer", "logs"]
    assert len(spec["tolerations"]) == 3
    assert spec["schedulerName"] == "volcano"


def test_a_volume_on_our_mount_point_replaces_ours() -> None:
    over = {
        "containers": [{"name": "trainer", "volumeMounts": [{"name": "ckpt", "mountPath": "/opt/ml/checkpoints"}]}],
        "volumes": [{"name": "ckpt", "persistentVolumeClaim": {"claimName": "c"}}],
    }
    frozen = resolved(job().pod(**over))
    assert mounts(frozen)["/opt/ml/checkpoints"] == "ckpt"
    assert "everstep-checkpoints" not in {v["name"] for v in frozen.pod["spec"]["volumes"]}


@pytest.mark.parametrize("plain", [False, True])
def test_the_last_message_of_an_agent_is_where_the_kubelet_reads_it(plain: bool) -> None:
    """With another path, a job that ends while nobody asks its leader would be trained again; with the end of a log in
    its place, what a script prints could be taken for the agent's."""
    given = {"terminationMessagePath": "/tmp/why", "terminationMessagePolicy": "FallbackToLogsOnError"}
    made = trainer(resolved(job().pod(containers=[{"name": "trainer", **given}]), plain=plain))
    assert given.items() <= made.items() if plain else not given.keys() & made.keys()


def test_a_read_only_root_gets_a_writable_tmp() -> None:
    read_only = {"containers": [{"name": "trainer", "securityContext": {"readOnlyRootFilesystem": True}}]}
    assert mounts(resolved(job().pod(**read_only)))["/tmp"] == "everstep-tmp"
    assert "/tmp" not in mounts(resolved(job()))


def test_a_writable_tmp_of_the_user_is_found_with_a_slash_at_its_end() -> None:
    trainer = {
        "name": "trainer",
        "securityContext": {"readOnlyRootFilesystem": True},
        "volumeMounts": [{"name": "scratch", "mountPath": "/tmp/"}],
    }
    over = {"containers": [trainer], "volumes": [{"name": "scratch", "emptyDir": {}}]}
    assert "/tmp" not in mounts(resolved(job().pod(**over)))


def test_slots_of_checkpoints_have_a_memory_of_their_own_that_restarts_in_place_leave_alone() -> None:
    frozen = resolved(job().resources(requests={"memory": "4Gi"}))
    folder = str(AgentPaths.for_pod(Path("/agent.pyz")).slots)  # ranks are told of it by their agent
    assert not folder.startswith("/dev/shm")
    (volume,) = [v for v in frozen.pod["spec"]["volumes"] if v["name"] == mounts(frozen)[folder]]
    assert volume["emptyDir"] == {"medium": "Memory", "sizeLimit": str(2 << 30)}


def test_a_user_who_names_another_memory_for_slots_gets_it() -> None:
    frozen = resolved(job().spec(env=[{"name": "EVERSTEP_CHECKPOINT_MEMORY", "value": "/cache"}]))
    named = [each["value"] for each in trainer(frozen)["env"] if each["name"] == "EVERSTEP_CHECKPOINT_MEMORY"]
    assert named == ["/cache"]


def test_shared_memory_is_half_of_the_memory() -> None:
    frozen = resolved(job().resources(limits={"memory": "8Gi"}))
    (shm,) = [v for v in frozen.pod["spec"]["volumes"] if v["name"] == "everstep-shm"]
    assert shm["emptyDir"] == {"medium": "Memory", "sizeLimit": str(4 << 30)}


@pytest.mark.parametrize(
    ("over", "named"),
    [
        ({"serviceAccountName": "admin"}, "admin"),
        ({"hostNetwork": True}, "hostNetwork"),
        ({"hostPID": True}, "hostPID"),
        ({"automountServiceAccountToken": True}, "automountServiceAccountToken"),
        ({"volumes": [{"name": "root", "hostPath": {"path": "/"}}]}, "hostPath"),
        (
            {"volumes": [{"name": "t", "projected": {"sources": [{"serviceAccountToken": {"path": "token"}}]}}]},
            "automountServiceAccountToken, for the serviceAccountToken in volumes ['t'],",
        ),
        ({"containers": [{"name": "x", "image": "y", "securityContext": {"privileged": True}}]}, "privileged"),
        ({"initContainers": [{"name": "x", "image": "y", "ports": [{"hostPort": 80}]}]}, "hostPort"),
    ],
)
def test_what_only_an_administrator_grants_is_refused(over: dict[str, Any], named: str) -> None:
    made = resolve_template(job().pod(**over).build(), epoch=1, pool=None, plain=False, settings=PlanSettings())
    assert isinstance(made, RejectedTemplate)
    assert made.reason == "NotPermitted"
    assert named in made.message


def test_a_checkpoint_volume_that_is_not_permitted_is_called_what_its_job_calls_it() -> None:
    builder = job().spec(checkpoint={"volume": {"hostPath": {"path": "/data"}}})
    made = resolve_template(builder.build(), epoch=1, pool=None, plain=False, settings=PlanSettings())
    assert isinstance(made, RejectedTemplate)
    assert made.message.startswith("checkpoint.volume is 'hostPath', allowed: ")


@pytest.mark.parametrize("profile", ["restricted", "image"])
@pytest.mark.parametrize(
    ("security", "grant"),
    [
        ({"capabilities": {"add": ["SYS_ADMIN"]}}, "capabilities"),
        ({"procMount": "Unmasked"}, "procMount"),
        ({"seccompProfile": {"type": "Unconfined"}}, "seccompProfile"),
        ({"capabilities": {"add": "SYS_ADMIN"}}, "capabilities"),
    ],
)
def test_what_the_security_profile_forbids_is_refused_and_may_be_granted(
    security: dict[str, Any], grant: str, profile: str
) -> None:
    over = {"containers": [{"name": "trainer", "securityContext": security}]}
    builder = job().pod(**over).spec(securityProfile=profile)
    made = resolve_template(builder.build(), epoch=1, pool=None, plain=False, settings=PlanSettings())
    assert isinstance(made, RejectedTemplate)
    assert made.reason == "NotPermitted"
    assert f"containers[trainer].securityContext.{grant}" in made.message
    assert f"to allow {grant} among its host fields" in made.message
    assert resolved(builder, host_fields=frozenset({grant}))


@pytest.mark.parametrize("security", [{"runAsUser": 0}, {"allowPrivilegeEscalation": True}, {"runAsNonRoot": False}])
def test_root_is_for_images_that_say_so(security: dict[str, Any]) -> None:
    over = {"containers": [{"name": "trainer", "securityContext": security}]}
    made = resolve_template(job().pod(**over).build(), epoch=1, pool=None, plain=False, settings=PlanSettings())
    assert isinstance(made, RejectedTemplate)
    assert "say securityProfile: image" in made.message
    assert resolved(job().pod(**over).spec(securityProfile="image"))


def test_other_containers_are_as_restricted_as_the_trainer() -> None:
    frozen = resolved(job().pod(initContainers=[{"name": "first", "image": "example.com/first:1"}]))
    (first,) = frozen.pod["spec"]["initContainers"]
    assert first["securityContext"] == trainer(frozen)["securityContext"]


def test_what_the_configuration_allows_passes() -> None:
    builder = job().pod(serviceAccountName="trainer", hostNetwork=True)
    frozen = resolved(builder, service_accounts=frozenset({"trainer"}), host_fields=frozenset({"hostNetwork"}))
    assert frozen.pod["spec"]["hostNetwork"] is True


@pytest.mark.parametrize(("plain", "port"), [(False, 8470), (True, 7777)], ids=["agent", "plain"])
def test_pods_in_the_network_of_their_nodes_claim_their_port_and_know_the_names_of_the_job(
    plain: bool, port: int
) -> None:
    """Two on one node could not both listen, and name servers of nodes know no pods."""
    mine = [{"containerPort": 6006}]
    builder = job().pod(hostNetwork=True, containers=[{"name": "trainer", "ports": mine}])
    spec = resolved(builder, plain=plain, host_fields=frozenset({"hostNetwork"})).pod["spec"]
    assert (spec["dnsPolicy"], spec["containers"][0]["ports"]) == (
        "ClusterFirstWithHostNet",
        [*mine, {"containerPort": port}],
    )
    chosen = job().pod(
        hostNetwork=True, dnsPolicy="Default", containers=[{"name": "trainer", "ports": spec["containers"][0]["ports"]}]
    )
    again = resolved(chosen, plain=plain, host_fields=frozenset({"hostNetwork"})).pod["spec"]
    assert (again["dnsPolicy"], again["containers"][0]["ports"]) == ("Default", spec["containers"][0]["ports"])


def test_a_projected_token_is_allowed_where_the_automatic_one_is() -> None:
    projected = {"name": "t", "projected": {"sources": [{"serviceAccountToken": {"path": "token"}}]}}
    frozen = resolved(job().pod(volumes=[projected]), host_fields=frozenset({"automountServiceAccountToken"}))
    assert projected in frozen.pod["spec"]["volumes"]


def test_only_labels_on_the_list_are_copied() -> None:
    labels = {"app.kubernetes.io/instance": "argo", "argocd.argoproj.io/instance": "a", "app.kubernetes.io/name": "n"}
    frozen = resolved(job().meta(labels=labels).spec(podTemplate={"metadata": {"labels": {"team": "vision"}}}))
    assert frozen.pod["metadata"]["labels"] == {"app.kubernetes.io/name": "n", "team": "vision"}


def test_what_was_frozen_reads_back_the_same_for_its_job_and_epoch_and_with_the_operators_key_alone() -> None:
    built = job().nodes(2).build()
    frozen = resolve_template(built, epoch=3, pool=None, plain=False, settings=PlanSettings())
    assert isinstance(frozen, FrozenTemplate)
    signed, place = template.build_config_map(built, frozen, b"key"), ("default", built.metadata.uid, 3, b"key")

    def read(raw: Any, namespace: str, uid: str, epoch: int, key: bytes) -> FrozenTemplate | None:
        return template.read_frozen_template(raw, namespace=namespace, uid=uid, epoch=epoch, keys=(key,))

    assert read(signed, *place) == frozen
    uid = built.metadata.uid
    for other in (
        ("elsewhere", uid, 3, b"key"),
        ("default", "another", 3, b"key"),
        ("default", uid, 2, b"key"),
        ("default", uid, 3, b"other"),
    ):
        assert read(signed, *other) is None
    data = signed["data"]
    forged = [{**data, name: data[name].replace("{", "{ ", 1)} for name in ("job.json", "template.json")]
    swapped = {**data, "job.json": data["template.json"], "template.json": data["job.json"]}
    unsigned = {name: value for name, value in data.items() if name != "signature"}
    for bad in (*forged, swapped, unsigned, {**data, "signature": "é"}, {**data, "more": ""}, {}, None, "text"):
        assert read({**signed, "data": bad}, *place) is None
    assert read({"metadata": {}}, *place) is None


def test_resolving_does_not_change_the_job() -> None:
    built = job().nodes(2).pod(tolerations=[{"key": "x"}]).build()
    before = built.manifest()
    resolve_template(built, epoch=1, pool=None, plain=False, settings=PlanSettings())
    assert built.manifest() == before


@pytest.mark.parametrize(
    ("over", "owns"),
    [
        ({}, (True, True)),
        ({"hostIPC": True}, (True, False)),
        (
            {
                "containers": [{"name": "trainer", "volumeMounts": [{"name": "host", "mountPath": "/dev/shm"}]}],
                "volumes": [{"name": "host", "hostPath": {"path": "/dev/shm"}}],
            },
            (False, True),
        ),
        (
            {
                "containers": [{"name": "trainer", "volumeMounts": [{"name": "big", "mountPath": "/dev/shm/"}]}],
                "volumes": [{"name": "big", "persistentVolumeClaim": {"claimName": "shared"}}],
            },
            (False, True),
        ),
        (
            {
                "containers": [{"name": "trainer", "volumeMounts": [{"name": "big", "mountPath": "/dev/shm"}]}],
                "volumes": [{"name": "big", "emptyDir": {"medium": "Memory"}}],
            },
            (True, True),
        ),
    ],
    ids=["own", "host-ipc", "host-path", "claim", "empty-dir"],
)
def test_the_agent_is_told_which_memory_no_other_pod_sees(over: dict[str, Any], owns: tuple[bool, bool]) -> None:
    frozen = resolved(job().spec(podTemplate={"spec": over}), host_fields=frozenset("*"))
    assert (frozen.job["ownsSharedMemory"], frozen.job["ownsIpc"]) == owns


@pytest.mark.parametrize(
    ("path", "source", "owns"),
    [
        ("/opt/ml/input/data/train", {"persistentVolumeClaim": {"claimName": "data"}}, True),
        ("/opt/ml", {"persistentVolumeClaim": {"claimName": "data"}}, True),  # ours lies over it
        ("/opt/ml/input", {"emptyDir": {}}, True),
        ("/opt/ml/input/", {"persistentVolumeClaim": {"claimName": "data"}}, False),
        ("/opt/ml/input/config", {"nfs": {"server": "files", "path": "/"}}, False),
    ],
)
def test_the_agent_is_told_whether_other_pods_see_the_contracts_files(
    path: str, source: dict[str, Any], owns: bool
) -> None:
    over = {
        "containers": [{"name": "trainer", "volumeMounts": [{"name": "data", "mountPath": path}]}],
        "volumes": [{"name": "data", **source}],
    }
    frozen = resolved(job().spec(podTemplate={"spec": over}), host_fields=frozenset("*"))
    assert frozen.job["ownsInput"] is owns


@pytest.mark.parametrize(
    ("name", "hook", "expected"),
    [
        ("trainer", {"preStop": {"sleep": {"seconds": 30}}}, 80),
        ("trainer", {"preStop": {"sleep": {"seconds": 119}}}, 5),
        ("trainer", {"preStop": {"exec": {"command": ["sleep", "30"]}}}, 110),
        ("trainer", {"preStop": {"sleep": {"seconds": "half a minute"}}}, 110),  # for the API server to reject
        ("proxy", {"preStop": {"sleep": {"seconds": 30}}}, 110),  # its own signal waits, not the trainer's
    ],
)
def test_a_hook_that_sleeps_before_the_signal_shortens_the_ranks_grace(
    name: str, hook: dict[str, Any], expected: int
) -> None:
    frozen = resolved(job().pod(containers=[{"name": name, "lifecycle": hook}]))
    assert frozen.job["stopGraceSeconds"] == expected


def variables(frozen: FrozenTemplate) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(frozen.job["variables"].get("EVERSTEP_CHECKPOINT", "{}"))
    return found


def volume(frozen: FrozenTemplate, name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(v for v in frozen.pod["spec"]["volumes"] if v["name"] == name)
    return found


def test_the_library_is_told_where_and_how_often_checkpoints_are_saved() -> None:
    policy = {"store": "s3://b/c", "every": "5m", "everySteps": 9, "keepLast": 2, "secretRef": {"name": "s3"}}
    frozen = resolved(job().spec(checkpoint=policy))
    assert variables(frozen) == {"store": "s3://b/c", "every": "5m", "every_steps": 9, "keep_last": 2}
    assert trainer(frozen)["envFrom"] == [{"secretRef": {"name": "s3"}}]


def test_an_overlay_adds_to_the_credentials() -> None:
    more = {"containers": [{"name": "trainer", "envFrom": [{"configMapRef": {"name": "mine"}}]}]}
    policy = {"store": "s3://b/c", "secretRef": {"name": "s3"}}
    frozen = resolved(job().spec(checkpoint=policy).pod(**more))
    assert trainer(frozen)["envFrom"] == [{"secretRef": {"name": "s3"}}, {"configMapRef": {"name": "mine"}}]


def test_plain_pods_are_told_of_checkpoints_too() -> None:
    frozen = resolved(job().plain().spec(checkpoint={"store": "s3://b/c"}), plain=True)
    environment = plain_mode.build_environment(frozen.job, 0, "digits-1", 1, [])
    assert {"name": "EVERSTEP_CHECKPOINT", "value": frozen.job["variables"]["EVERSTEP_CHECKPOINT"]} in environment


def test_a_volume_for_checkpoints_is_mounted_in_its_place() -> None:
    claim = {"persistentVolumeClaim": {"claimName": "c"}}
    frozen = resolved(job().nodes(2).spec(checkpoint={"volume": claim}))
    assert volume(frozen, mounts(frozen)["/opt/ml/checkpoints"]) == {"name": "everstep-checkpoints", **claim}
    assert variables(frozen)["store"] == "/opt/ml/checkpoints"


def test_a_folder_of_the_node_for_checkpoints_needs_a_grant() -> None:
    builder = job().spec(checkpoint={"volume": {"hostPath": {"path": "/data"}}})
    made = resolve_template(builder.build(), epoch=1, pool=None, plain=False, settings=PlanSettings())
    assert isinstance(made, RejectedTemplate)
    assert "hostPath" in made.message


def test_nodes_that_share_no_place_for_checkpoints_are_told_so() -> None:
    assert "spec.checkpoint.store" in variables(resolved(job("a").nodes(2)))["missing"]
    assert variables(resolved(job().nodes(1))) == {}, "its folder outlives restarts in place"
    each: dict[str, Any] = {"volume": {"ephemeral": {"volumeClaimTemplate": {"spec": {}}}}}
    assert "spec.checkpoint.store" in variables(resolved(job().nodes(2).spec(checkpoint=each)))["missing"]
    rest = variables(resolved(job().nodes(2).spec(checkpoint={"every": "5m", "keepLast": 2})))
    assert (rest["every"], rest["keep_last"], "store" in rest) == ("5m", 2, False), "for a script that names a store"
    mine = {
        "volumes": [{"name": "mine", "persistentVolumeClaim": {"claimName": "c"}}],
        "containers": [{"name": "trainer", "volumeMounts": [{"name": "mine", "mountPath": "/opt/ml/checkpoints/"}]}],
    }
    assert variables(resolved(job().nodes(2).pod(**mine))) == {}


def test_memory_for_checkpoints_is_a_part_of_the_pods() -> None:
    frozen = resolved(job().resources(limits={"memory": "10Gi"}).spec(checkpoint={"memory": "4Gi"}))
    assert volume(frozen, "everstep-memory")["emptyDir"]["sizeLimit"] == str(4 << 30)
    assert volume(frozen, "everstep-shm")["emptyDir"]["sizeLimit"] == str(3 << 30)
    made = resolve_template(
        job().resources(limits={"memory": "10Gi"}).spec(checkpoint={"memory": "10Gi"}).build(),
        epoch=1, pool=None, plain=False, settings=PlanSettings(),
    )  # fmt: skip
    assert isinstance(made, RejectedTemplate)
    assert made.message.startswith("checkpoint.memory is 10Gi, and the pod has 10737418240 bytes of memory")
