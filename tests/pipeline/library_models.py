"""Models of the transformers library, tiny, from configurations: nobody downloads anything.

What people have: nested results, masks made by the library, decorators, tables in modules of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from tests.pipeline.architectures import WORDS
from tests.pipeline.models import CASES, Batch, Case, next_words, words


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=WORDS, n_positions=32, n_embd=16, n_layer=3, n_head=2, use_cache=False,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )
    )  # fmt: skip


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(
            vocab_size=WORDS, hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=32,
            max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip


def _t5(dropout: float = 0.0) -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=WORDS, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, dropout_rate=dropout,
            use_cache=False, pad_token_id=0, decoder_start_token_id=0,
        )
    )  # fmt: skip


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS, hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=32, use_cache=False,
        )
    )  # fmt: skip


def _mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=WORDS, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, num_local_experts=3, max_position_embeddings=32, use_cache=False,
            experts_implementation="eager",
        )
    )  # fmt: skip


def _with_flags(like: str) -> Callable[[int, int], Batch]:
    def batch(samples: int, seed: int) -> Batch:
        found = CASES[like].batch(samples, seed)
        inputs: dict[str, Any] = {**found.inputs, "use_cache": False} if like == "t5" else found.inputs
        return Batch(inputs, found.targets)

    return batch


LIBRARY: dict[str, Case] = {
    case.name: case
    for case in (
        Case("gpt2", _gpt2, _with_flags("gpt"), next_words),
        Case("bert-masked", _bert, _with_flags("bert"), words),
        Case("t5-small", _t5, _with_flags("t5"), words),
        # One dropout at both ends of each stack.
        Case("t5-dropout", partial(_t5, 0.1), _with_flags("t5"), words, per_microbatch=True),
        Case("llama-grouped", _llama, _with_flags("llama"), next_words),
        Case("mixtral", _mixtral, _with_flags("llama"), next_words, per_microbatch=True),
    )
}
