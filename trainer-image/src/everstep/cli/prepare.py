"""From a manifest to what the agents of this machine need; and what of it cannot be had without a cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from everstep.cli.errors import CliError
from everstep.cli.hostpaths import HostCommand, PathMapping, adapt_command
from everstep.cli.local import EPOCH, LocalJob

if TYPE_CHECKING:
    from everstep_operator.api.job import TrainingJob


@dataclass(frozen=True)
class PreparedJob:
    """A job that can run on this machine. `notes` are what differs from a cluster, for the user to know."""

    name: str
    local: LocalJob
    restarts: int
    ignored_codes: frozenset[int]  # exit codes whose restarts are not charged
    window_seconds: float  # for which a restart counts
    notes: tuple[str, ...]
    file: Path
    checkpoint: Mapping[str, Any]  # what the manifest says, by the names of the library's arguments


def prepare_local_job(
    job: TrainingJob, file: Path, *, nodes: int | None, procs: int | None, maps: Sequence[str], python: str | None
) -> PreparedJob:
    """Make of a manifest what the agents of this machine need.

    Args:
        job: The job.
        file: Its manifest.
        nodes: The number of nodes instead of the manifest's.
        procs: The number of ranks per node instead of the manifest's.
        maps: Folders of the image and what stands for them here, as `--map` has them.
        python: The interpreter, if it was given.

    Raises:
        CliError: The job cannot run without a cluster.
    """
    from everstep_operator.plan.agent_config import build_job_config
    from everstep_operator.plan.plan_settings import PlanSettings

    if job.spec.command is None:
        raise CliError(
            f"{job.metadata.name} has no spec.command: it runs its image's entrypoint, and there is no image here. "
            "Write the command into the manifest"
        )
    overrides = {"num_nodes": nodes, "num_proc_per_node": procs}
    changes = {name: value for name, value in overrides.items() if value is not None}
    job = job.model_copy(update={"spec": job.spec.model_copy(update=changes)})
    config = build_job_config(job, template_epoch=EPOCH, pool=None, settings=PlanSettings())
    if any("\0" in word for word in config["command"]):
        raise CliError(f"the command of {job.metadata.name} has a NUL character, which no argument can hold: remove it")
    beside = Path.cwd() if str(file) == "-" else file.absolute().parent
    command = adapt_command(config["command"], beside, [PathMapping.parse(text) for text in maps], python)
    # No DNS names here: the leader has its peers from us.
    config = {**config, "command": list(command.argv), "service": ""}
    environment, missing = _read_environment(job)
    return PreparedJob(
        name=job.metadata.name or "job",
        local=LocalJob(config, environment),
        restarts=job.spec.restart.application,
        ignored_codes=frozenset(code for code in range(1, 256) if job.spec.restart.find_action(code) == "Ignore"),
        window_seconds=job.spec.restart.window.total_seconds(),
        notes=tuple(_list_notes(job, command, missing)),
        file=file,
        checkpoint=_describe_checkpoint(job),
    )


def _describe_checkpoint(job: TrainingJob) -> dict[str, Any]:
    """Return what the manifest says of checkpoints. A volume is not here, and so no folder of one."""
    policy = job.spec.checkpoint
    said = policy.describe_for_library() if policy is not None else {}
    if policy is None or policy.store is None or policy.store.startswith("/"):
        said.pop("store", None)
    return {} if policy is not None and policy.folder is not None else said


def _read_environment(job: TrainingJob) -> tuple[dict[str, str], list[str]]:
    """Return the variables with a value, and the names of those that only a cluster can fill.

    Raises CliError for a value that no process can get.
    """
    literal = {each.name: each.value or "" for each in job.spec.env if each.value_from is None}
    if wrong := next((name for name, value in literal.items() if "\0" in value), None):
        raise CliError(
            f"the variable {wrong} in spec.env has a NUL character, which no environment can hold: remove it"
        )
    return literal, [each.name for each in job.spec.env if each.value_from is not None]


def _list_notes(job: TrainingJob, command: HostCommand, missing: Sequence[str]) -> list[str]:
    notes = [f"{written} -> {here}" for written, here in command.changed]
    if missing:
        notes.append(f"ignored variables, whose values are on the cluster: {', '.join(missing)}")
    if job.spec.checkpoint is not None and job.spec.checkpoint.folder is not None:
        notes.append("checkpoint.folder is not used: what the program writes stays in the folders of this run")
    if job.spec.pod_template.spec.volumes:
        notes.append("podTemplate is not used: its volumes do not exist here")
    return notes
