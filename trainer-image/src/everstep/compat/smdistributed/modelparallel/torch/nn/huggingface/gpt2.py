"""Translations between the names of transformers' GPT-2 and those of tensor parallelism, which is not offered."""

from __future__ import annotations

from everstep.compat.smdistributed.modelparallel.torch.refused import NotOfferedName

translate_hf_state_dict_to_smdistributed_gpt2 = NotOfferedName(
    "nn.huggingface.gpt2.translate_hf_state_dict_to_smdistributed_gpt2"
)
translate_state_dict_to_hf_gpt2 = NotOfferedName("nn.huggingface.gpt2.translate_state_dict_to_hf_gpt2")
