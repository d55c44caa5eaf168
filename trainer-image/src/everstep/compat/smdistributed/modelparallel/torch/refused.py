"""Names that are documented and not offered: they are there, and say why when they are used."""

from __future__ import annotations

from typing import Any, NoReturn


class NotOffered(NotImplementedError):
    """The message says what to do instead."""


_TENSOR = "tensor parallelism is not offered: use more partitions"

_NAMES = "without tensor parallelism models are not changed: state dictionaries have their names"

REASONS = {
    "tensor_parallelism": _TENSOR,
    "set_tensor_parallelism": _TENSOR,
    "tp_register": _TENSOR,
    "tp_register_with_module": _TENSOR,
    "nn.DistributedLinear": _TENSOR,
    "nn.DistributedEmbedding": _TENSOR,
    "nn.DistributedTransformer": _TENSOR,
    "nn.DistributedTransformerLMHead": _TENSOR,
    "nn.DistributedTransformerLayer": _TENSOR,
    "nn.DistributedAttentionLayer": _TENSOR,
    "nn.DistributedTransformerOutputLayer": _TENSOR,
    "nn.FlashAttentionLayer": "use torch.nn.functional.scaled_dot_product_attention",
    "nn.huggingface.gpt2.translate_hf_state_dict_to_smdistributed_gpt2": _NAMES,
    "nn.huggingface.gpt2.translate_state_dict_to_hf_gpt2": _NAMES,
    "optimizers.FusedNovoGrad": "it is apex's: use an optimizer of torch",
    "optimizers.FusedLamb": "it is apex's: use an optimizer of torch, as AdamW(fused=True)",
    "DistributedModel.distributed_modules": _TENSOR,
    "DistributedModel.is_distributed_parameter": _TENSOR,
    "DistributedModel.is_distributed_buffer": _TENSOR,
    "DistributedModel.is_scaled_batch_parameter": _TENSOR,
    "DistributedModel.is_scaled_batch_buffer": _TENSOR,
    "DistributedModel.default_reducer_named_parameters": _TENSOR,
    "DistributedModel.scaled_batch_reducer_named_parameters": _TENSOR,
    "DistributedModel.join": "give all replicas as many batches, as with drop_last=True",
    "DistributedModel.register_comm_hook": "gradients are reduced as actions of the schedule, which has no hooks",
    "DistributedModel.save_model": "it is for TensorFlow: use smp.save",
    "StepOutput.merge": "it is for TensorFlow: use concat",
    "StepOutput.accumulate": "it is for TensorFlow: use reduce_mean",
    "CheckpointManager": "it is for TensorFlow: use smp.save_checkpoint and smp.resume_from_checkpoint",
}


def raise_not_offered(name: str) -> NoReturn:
    """Raise NotOffered, with the reason."""
    raise NotOffered(f"smp.{name}: {REASONS[name]}")


class NotOfferedName:
    """A stand-in for a name that is not offered; it may be looked at, but neither called nor derived from."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise_not_offered(self._name)

    def __mro_entries__(self, bases: tuple[Any, ...]) -> NoReturn:
        raise_not_offered(self._name)

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        raise_not_offered(self._name)
