"""The names of `smdistributed.modelparallel.torch`, the PyTorch side of the SageMaker model parallel library v1.

What each does, and which are refused with a reason: docs/how-to/sagemaker-model-parallel.md.
"""

from __future__ import annotations

from everstep.compat.smdistributed.modelparallel.torch import amp, nn, optimizers
from everstep.compat.smdistributed.modelparallel.torch.checkpoints import (
    load,
    resume_from_checkpoint,
    save,
    save_checkpoint,
)
from everstep.compat.smdistributed.modelparallel.torch.comm import (
    CommGroup,
    RankType,
    allgather,
    barrier,
    broadcast,
    dp_barrier,
    mp_barrier,
    recv_from,
    send,
)
from everstep.compat.smdistributed.modelparallel.torch.model import DistributedModel
from everstep.compat.smdistributed.modelparallel.torch.optimizer import DistributedOptimizer
from everstep.compat.smdistributed.modelparallel.torch.placing import (
    delay_param_initialization,
    model_creation,
    partition,
    set_partition,
)
from everstep.compat.smdistributed.modelparallel.torch.ranks import (
    dp_rank,
    dp_size,
    get_dp_group,
    get_dp_process_group,
    get_mp_group,
    get_mp_process_group,
    get_pp_group,
    get_pp_process_group,
    get_rdp_group,
    get_rdp_process_group,
    get_tp_group,
    get_tp_process_group,
    get_world_process_group,
    local_rank,
    local_size,
    mp_rank,
    mp_size,
    pp_rank,
    pp_size,
    rank,
    rdp_rank,
    rdp_size,
    size,
    tp_rank,
    tp_size,
)
from everstep.compat.smdistributed.modelparallel.torch.recompute import (
    checkpoint,
    checkpoint_sequential,
    set_activation_checkpointing,
)
from everstep.compat.smdistributed.modelparallel.torch.refused import NotOffered, NotOfferedName
from everstep.compat.smdistributed.modelparallel.torch.state import (
    NotInitialized,
    init,
    is_initialized,
    is_tracing,
    shutdown,
)
from everstep.compat.smdistributed.modelparallel.torch.step import StepOutput, step

WORLD = CommGroup.WORLD
MP_GROUP = CommGroup.MP_GROUP
DP_GROUP = CommGroup.DP_GROUP
PP_GROUP = CommGroup.PP_GROUP
TP_GROUP = CommGroup.TP_GROUP
RDP_GROUP = CommGroup.RDP_GROUP

tensor_parallelism = NotOfferedName("tensor_parallelism")
set_tensor_parallelism = NotOfferedName("set_tensor_parallelism")
tp_register = NotOfferedName("tp_register")
tp_register_with_module = NotOfferedName("tp_register_with_module")
CheckpointManager = NotOfferedName("CheckpointManager")

__all__ = [
    "DP_GROUP",
    "MP_GROUP",
    "PP_GROUP",
    "RDP_GROUP",
    "TP_GROUP",
    "WORLD",
    "CheckpointManager",
    "CommGroup",
    "DistributedModel",
    "DistributedOptimizer",
    "NotInitialized",
    "NotOffered",
    "RankType",
    "StepOutput",
    "allgather",
    "amp",
    "barrier",
    "broadcast",
    "checkpoint",
    "checkpoint_sequential",
    "delay_param_initialization",
    "dp_barrier",
    "dp_rank",
    "dp_size",
    "get_dp_group",
    "get_dp_process_group",
    "get_mp_group",
    "get_mp_process_group",
    "get_pp_group",
    "get_pp_process_group",
    "get_rdp_group",
    "get_rdp_process_group",
    "get_tp_group",
    "get_tp_process_group",
    "get_world_process_group",
    "init",
    "is_initialized",
    "is_tracing",
    "load",
    "local_rank",
    "local_size",
    "model_creation",
    "mp_barrier",
    "mp_rank",
    "mp_size",
    "nn",
    "optimizers",
    "partition",
    "pp_rank",
    "pp_size",
    "rank",
    "rdp_rank",
    "rdp_size",
    "recv_from",
    "resume_from_checkpoint",
    "save",
    "save_checkpoint",
    "send",
    "set_activation_checkpointing",
    "set_partition",
    "set_tensor_parallelism",
    "shutdown",
    "size",
    "step",
    "tensor_parallelism",
    "tp_rank",
    "tp_register",
    "tp_register_with_module",
    "tp_size",
]
