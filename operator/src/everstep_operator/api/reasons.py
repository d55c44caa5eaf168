"""Every reason that a condition, an event or a failure can carry, with its meaning. Nothing else is one.

``docs/reference/reasons.md`` is generated from this table.
"""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """A CamelCase word; ``meaning`` says in one line what happened and, where there is something to do, what."""

    meaning: str

    def __new__(cls, value: str, meaning: str) -> Reason:
        made = str.__new__(cls, value)
        made._value_ = value
        made.meaning = meaning
        return made

    # The request
    SPEC_INVALID = "SpecInvalid", "The stored object breaks a rule of the API; correct it and apply it again."
    UNKNOWN_FIELDS = (
        "UnknownFields",
        "The CRDs are newer than the operator, and the job or its pool has fields that it does not know. Running jobs "
        "continue; this one starts when the operator is upgraded, or the fields are removed.",
    )
    INVALID_TEMPLATE = (
        "InvalidTemplate",
        "The API server rejects the job's pods; its message names the wrong field.",
    )
    NAMESPACE_NOT_ALLOWED = (
        "NamespaceNotAllowed",
        "The pool does not allow this namespace; ask its owner or use another pool.",
    )
    POOL_NOT_FOUND = "PoolNotFound", "No TrainingPool of that name exists; the job waits for it."
    NO_ON_DEMAND_POOL = (
        "NoOnDemandPool",
        "spec.minOnDemand needs a TrainingPool of capacityType on-demand, and none of the job's pools is one; name one "
        "more, or set minOnDemand to 0.",
    )
    NOT_PERMITTED = (
        "NotPermitted",
        "The pod template requests something that the operator's configuration does not allow. A job that was "
        "allowed before waits until it is again, or until it is suspended and its template corrected; others fail.",
    )
    ADMISSION_REJECTED = (
        "AdmissionRejected",
        "The API server, an admission webhook or a policy rejects an object of a job that had pods before, something "
        "that its pods name does not exist yet, or a webhook is unavailable; the operator retries every 30 s. The "
        "message names the rule: change it, or suspend the job and correct its template.",
    )
    NAME_CONFLICT = (
        "NameConflict",
        "An object that does not belong to the job has a name that the job needs; delete or rename one of them.",
    )
    QUOTA_EXCEEDED = (
        "QuotaExceeded",
        "The namespace's quota rejects the pods, or another object of the job; the job waits.",
    )
    READ_WRITE_ONCE = (
        "ReadWriteOnce",
        "Pods of the job mount a PersistentVolumeClaim that one node can mount at a time: pods on other nodes wait "
        "for it for ever, or after a lost node for at least six minutes. Use one that is ReadWriteMany, or an object "
        "store.",
    )
    VOLUMES_SHARED = "VolumesShared", "The job's pods mount no claim any more that one node can mount at a time."
    STATUS_REFUSED = (
        "StatusRefused",
        "The API server rejects the status; the operator writes it without progress and last failure.",
    )
    STATUS_RESTORED = (
        "StatusRestored",
        "A client set the job's status to an earlier one (a lower epoch, fewer restarts); the operator restored it. "
        "To allow more restarts, raise spec.restart.",
    )
    RETRYING = (
        "Retrying",
        "A request for the job fails repeatedly; the operator retries after pauses of up to a minute.",
    )

    BUDGET_REJECTED = (
        "DisruptionBudgetRejected",
        "The job's PodDisruptionBudget cannot be created or deleted; the message says why. The job runs without it, or "
        "drains of its nodes wait until somebody deletes it.",
    )

    # Progress of a job
    CREATED = "Created", "The job was accepted; its objects are being created."
    WAITING_FOR_CAPACITY = "WaitingForCapacity", "Not all pods have a node yet."
    SCHEDULED = "Scheduled", "All pods have a node."
    CONTAINER_WAITING = (
        "ContainerWaiting",
        "A pod has a node, and its kubelet cannot start it: the message quotes what it says of the image, or of a "
        "Secret or ConfigMap that a variable refers to. It tries again until timeouts.startup; in a job that has run, "
        "for timeouts.pending besides.",
    )
    GANG_RELEASED = (
        "GangReleased",
        "The set of pods could not be completed; its pods were released so that another job can run.",
    )
    NEXT_POOL = "NextPool", "The pool had no capacity within its wait; the operator tries the next one."
    RUNNING = "Running", "All ranks have started."
    RESTARTING = "Restarting", "A generation ended early; the leader forms the next one."
    SUSPENDED = "Suspended", "spec.suspend is true: the job's pods are stopped."
    RESUMED = "Resumed", "spec.suspend went back to false: the job starts again."
    STOPPING = "Stopping", "The operator stops the pods with their grace period."
    COMPLETED = "Completed", "All ranks exited with code 0."

    # Checkpoints
    RESTORED = "Restored", "The ranks of a new generation continue from a checkpoint; the message names step and place."
    CHECKPOINT_DAMAGED = (
        "CheckpointDamaged",
        "A restore passed over newer checkpoints because they are damaged; the ranks' log names each with its fault.",
    )
    SAVE_FAILED = (
        "SaveFailed",
        "A checkpoint could not be saved; training continues, and the ranks' log says why.",
    )
    CHECKPOINT_OVERDUE = (
        "CheckpointOverdue",
        "No checkpoint was saved for much longer than the job's interval: a failure now would cost all that time.",
    )
    CHECKPOINT_CURRENT = "CheckpointCurrent", "Checkpoints are saved at the job's interval."

    # Limits
    PENDING_TIMEOUT = "PendingTimeout", "There was no capacity for all pods within timeouts.pending."
    STARTUP_TIMEOUT = "StartupTimeout", "Not all ranks started within timeouts.startup."
    RUNTIME_TIMEOUT = "RuntimeTimeout", "The job ran longer than timeouts.runtime."
    RESTART_BUDGET_EXCEEDED = (
        "RestartBudgetExceeded",
        "The program failed more often than restart.application allows in one window.",
    )
    INFRASTRUCTURE_BUDGET_EXCEEDED = (
        "InfrastructureBudgetExceeded",
        "Pods were lost more often than restart.infrastructure allows in one window.",
    )

    START_FAILED = (
        "StartFailed",
        "The agent of a pod, or an init container, fails at its start; the message names it and quotes its error.",
    )

    # Failures of the program
    APPLICATION_ERROR = "ApplicationError", "A rank exited with a code other than 0."
    FATAL_EXIT_CODE = (
        "FatalExitCode",
        "A rank exited with a code for which restart.onExitCodes says Fail: the job is not restarted.",
    )
    OUT_OF_MEMORY = (
        "OutOfMemory",
        "A rank or its container was killed for memory; raise resources.limits.memory or use less.",
    )
    HANG = (
        "Hang",
        "No rank made a step within timeouts.hang; the ranks' stacks are in the log, and the message names the rank "
        "that is behind.",
    )
    CONTAINER_KILLED = "ContainerKilled", "The trainer container was killed from outside the job."

    # Failures of the infrastructure
    POD_LOST = "PodLost", "A pod vanished or ended without a termination message of its agent."
    POD_DELETED = "PodDeleted", "Someone deleted a pod of the job."
    EVICTED = "Evicted", "The cluster evicted a pod (drain, pressure, disruption, taint)."
    NODE_LOST = "NodeLost", "A node with pods of the job stopped responding, or was removed."
    HELD = (
        "Held",
        "Most nodes of the job, its zone, its pool or the cluster are silent at once, as in a network partition: their "
        "pods stay until some of the nodes are heard again; delete those pods if the machines are dead.",
    )
    NODE_NOT_READY = "NodeNotReady", "A node under the job's pods is not Ready."
    NODE_AVOIDED = "NodeAvoided", "Jobs have failed on a node, and new pods avoid it for a while."
    GPU_UNHEALTHY = "GpuUnhealthy", "A GPU under the job's pods has a problem; the job continues while its ranks run."
    NODE_UNHEALTHY = (
        "NodeUnhealthy",
        "A node under the job's pods reports a fault; the job continues while its ranks run.",
    )
    NODE_DRAINING = "NodeDraining", "A node under the job's pods is cordoned, or its Node object is being deleted."
    UNCLEAN_NODE = (
        "UncleanNode",
        "Processes or GPU memory of an old generation could not be removed; the pod is replaced.",
    )
    FENCED = "Fenced", "Ranks without a connection to their leader were stopped."

    # Pre-emption, free of charge
    SPOT_INTERRUPTION = "SpotInterruption", "The provider reclaims a node under the job's pods, which leave it."
    NODE_MAINTENANCE = "NodeMaintenance", "A node under the job's pods goes down for maintenance; they leave it."
    PREEMPTED = "Preempted", "The scheduler pre-empted a pod for one of higher priority, or Kueue evicted it."
    SCALE_DOWN = "ScaleDown", "An autoscaler removes a node under the job's pods, which leave it."

    # Modes
    NO_COMMAND = "NoCommand", "spec.command is absent: the image's entrypoint runs without the agent (plain mode)."
    NO_PYTHON = "NoPython", "The image has no python3: its command runs without the agent (plain mode)."
    PYTHON_UNSUPPORTED = "PythonUnsupported", "The image's Python is too old or incomplete for the agent: plain mode."
    AGENT_IN_USE = "AgentInUse", "The agent runs the ranks; the job is not in plain mode."
    AGENT_UNREACHABLE = (
        "AgentUnreachable",
        "The operator cannot reach the leader and relies on pod status; check network policies on port 8470.",
    )
    AGENT_REACHABLE = "AgentReachable", "The operator reads progress and failures from the leader."

    # Conditions that do not hold
    IN_PROGRESS = "InProgress", "The operator works towards the spec."
    NODES_HEALTHY = "NodesHealthy", "Every node under the job's pods is Ready and accepts pods again."
    NOTICE_WITHDRAWN = "NoticeWithdrawn", "A node that was to go away stays: its signal is gone, and ranks go on."
    UP_TO_DATE = "UpToDate", "The job matches its spec; the operator has nothing to do."
