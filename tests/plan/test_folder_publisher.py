"""Programs that only write files: one container restores their folder, one publishes it (`spec.checkpoint.folder`)."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from everstep_operator.plan.frozen_template import FrozenTemplate
from everstep_operator.plan.node_capacity import _sum_requests
from everstep_operator.plan.plan_settings import PlanSettings
from everstep_operator.plan.pod_manifest import build_pod
from everstep_operator.plan.template import RejectedTemplate, resolve_template
from tests.builders import JobBuilder, job

SHARED = {"persistentVolumeClaim": {"claimName": "shared"}}
POLICY = {"store": "s3://bucket/run", "secretRef": {"name": "s3"}, "keepLast": 2, "folder": {"quiet": "5s"}}


def resolve(builder: JobBuilder, *, plain: bool = False) -> FrozenTemplate | RejectedTemplate:
    return resolve_template(builder.build(), epoch=1, pool=None, plain=plain, settings=PlanSettings())


def containers(frozen: FrozenTemplate | RejectedTemplate, index: int = 0, epoch: int = 7) -> dict[str, dict[str, Any]]:
    assert isinstance(frozen, FrozenTemplate)
    spec = build_pod(frozen, index, epoch)["spec"]
    return {each["name"]: each for each in [*spec.get("initContainers", []), *spec["containers"]]}


@pytest.mark.parametrize("plain", [False, True])
def test_the_folder_is_restored_before_the_program_starts_and_published_beside_it(*, plain: bool) -> None:
    builder = (
        job().nodes(2).spec(checkpoint={**POLICY, "volume": SHARED}, env=[{"name": "AWS_REGION", "value": "eu-west-1"}])
    )
    found = containers(resolve(builder.plain() if plain else builder, plain=plain))
    assert list(found) == ["everstep-restore", "everstep-publish", "trainer"]
    assert found["everstep-restore"]["command"][4:] == [
        "restore", "s3://bucket/run", "/opt/everstep/checkpoints/files", "--if-any", "--if-empty", "--wait", "120",
        "--resume",
    ]  # fmt: skip
    assert "restartPolicy" not in found["everstep-restore"]
    assert found["everstep-publish"]["restartPolicy"] == "Always", "a sidecar: ended after the trainer"
    assert found["everstep-publish"]["command"][4:] == [
        "publish", "/opt/everstep/checkpoints/files", "s3://bucket/run", "--watch", "--keep-last", "2", "--quiet", "5"
    ]  # fmt: skip
    for name in ("everstep-restore", "everstep-publish"):
        assert found[name]["image"] == found["trainer"]["image"]
        assert found[name]["envFrom"] == [{"secretRef": {"name": "s3"}}]
        assert {"name": "AWS_REGION", "value": "eu-west-1"} in found[name]["env"]
        assert {"name": "EVERSTEP_EPOCH", "value": "7"} in found[name]["env"], "its fencing token"
        (identity,) = (each["value"] for each in found[name]["env"] if each["name"] == "EVERSTEP_JOB")
        assert identity.endswith(builder.build().metadata.uid), "a job that is made again is another one"
        assert found[name]["volumeMounts"] == [
            {"name": "everstep-checkpoints", "mountPath": "/opt/everstep/checkpoints"}
        ]
        assert found[name]["securityContext"]["allowPrivilegeEscalation"] is False
    (mount,) = (m for m in found["trainer"]["volumeMounts"] if m["mountPath"] == "/opt/ml/checkpoints")
    assert mount == {"name": "everstep-checkpoints", "mountPath": "/opt/ml/checkpoints", "subPath": "files"}


def test_only_the_first_pod_publishes() -> None:
    frozen = resolve(job().nodes(2).spec(checkpoint={**POLICY, "volume": SHARED}))
    assert list(containers(frozen, 1)) == ["everstep-restore", "trainer"]
    first, second = (containers(frozen, index)["everstep-restore"] for index in (0, 1))
    assert first["command"] == second["command"], "no pod restores another job's files"
    assert second["command"][-1] == "--resume"
    assert {each["name"] for each in first["env"]} - {each["name"] for each in second["env"]} == {
        "EVERSTEP_EPOCH",
        "EVERSTEP_ATTEMPT",
    }, "who does not publish has no attempt"
    assert isinstance(frozen, FrozenTemplate)
    (volume,) = (each for each in frozen.pod["spec"]["volumes"] if each["name"] == "everstep-checkpoints")
    assert volume["persistentVolumeClaim"] == SHARED["persistentVolumeClaim"]


@pytest.mark.parametrize("volume", [None, {"ephemeral": {}}])
def test_pods_that_share_no_folder_would_go_on_from_different_files(volume: dict[str, Any] | None) -> None:
    """Those of pod 0 from the newest, others from older ones: what runs again in place is not restored anew."""
    policy = {**POLICY, **({"volume": volume} if volume is not None else {})}
    with pytest.raises(ValidationError, match=r"needs checkpoint\.volume, which they share"):
        job().nodes(2).spec(checkpoint=policy).build()
    job().nodes(1).spec(checkpoint=policy).build()


def test_the_program_says_when_its_files_are_complete_and_which_image_can_publish_them() -> None:
    folder = {"marker": "DONE", "each": "checkpoint-*", "image": "example.com/publisher:1"}
    found = containers(resolve(job().spec(checkpoint={**POLICY, "folder": folder})))
    command = found["everstep-publish"]["command"]
    assert command[command.index("--marker") :] == ["--marker", "DONE", "--each", "checkpoint-*"]
    assert "--quiet" not in command
    assert found["everstep-publish"]["image"] == found["everstep-restore"]["image"] == "example.com/publisher:1"


@pytest.mark.parametrize("folder", [{}, {"each": "checkpoint-*"}, {"marker": "DONE", "quiet": "5s"}])
def test_how_files_become_complete_is_said_and_not_guessed(folder: dict[str, Any]) -> None:
    """Files that a killed program leaves half-written do not change any more either."""
    with pytest.raises(ValidationError, match="set either marker"):
        job().spec(checkpoint={**POLICY, "folder": folder}).build()


def test_a_pod_template_may_size_the_containers_and_they_keep_a_guaranteed_pod_guaranteed() -> None:
    frozen = resolve(job().spec(checkpoint=POLICY))
    amounts = containers(frozen)["everstep-publish"]["resources"]
    assert amounts["requests"] == amounts["limits"]
    assert isinstance(frozen, FrozenTemplate)
    more = {"name": "everstep-publish", "resources": {"requests": {"memory": "2Gi"}, "limits": {"memory": "2Gi"}}}
    sized = resolve(job().spec(checkpoint=POLICY).pod(initContainers=[more]))
    assert containers(sized)["everstep-publish"]["resources"]["limits"] == {"cpu": "500m", "memory": "2Gi"}
    assert isinstance(sized, FrozenTemplate)
    grown = _sum_requests(sized.pod["spec"])["memory"] - _sum_requests(frozen.pod["spec"])["memory"]
    assert grown == (2 << 30) - (512 << 20), "the scheduler counts a sidecar, and so does a gang"


def test_a_volume_over_the_folder_would_hide_what_is_to_be_published() -> None:
    mine = {
        "volumes": [{"name": "mine", "persistentVolumeClaim": {"claimName": "c"}}],
        "containers": [{"name": "trainer", "volumeMounts": [{"name": "mine", "mountPath": "/opt/ml/checkpoints/"}]}],
    }
    rejected = resolve(job().spec(checkpoint=POLICY).pod(**mine))
    assert isinstance(rejected, RejectedTemplate)
    assert "podTemplate mounts another volume" in rejected.message


def test_without_a_folder_nothing_is_added() -> None:
    found = containers(resolve(job().spec(checkpoint={"store": "s3://bucket/run"})))
    assert list(found) == ["trainer"]
    assert all("subPath" not in mount for mount in found["trainer"]["volumeMounts"])


def test_the_library_in_such_a_job_says_who_saves() -> None:
    frozen = resolve(job().spec(checkpoint=POLICY))
    assert isinstance(frozen, FrozenTemplate)
    said = frozen.job["variables"]["EVERSTEP_CHECKPOINT"]
    assert "program writes files of its own" in said
    assert "s3://" not in said, "two programs would count the steps of one store"
