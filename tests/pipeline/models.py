"""Small models of every kind that a pipeline must get right, each with its batches and its loss.

Plain torch; `library_models` has those of the transformers library. Names of arguments are those of `forward`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.pipeline.architectures import T5, WORDS, Bert, Custom, Gpt, Llama, Mixture, Mlp, Pair, ResNet, UNet

IGNORED = -100


@dataclass(frozen=True)
class Batch:
    """`inputs` by the names of forward's arguments; all tensors have the samples as their first dimension."""

    inputs: dict[str, Any]
    targets: Any


@dataclass(frozen=True)
class Case:
    """`batch(samples, seed)`; `loss(outputs, targets)` gives (sum, count).

    `per_microbatch`: whether the result depends on how a batch is cut (batch statistics, dropout, expert balance).
    """

    name: str
    factory: Callable[[], nn.Module]
    batch: Callable[[int, int], Batch]
    loss: Callable[[Any, Any], tuple[Any, Any]]
    per_microbatch: bool = False

    def build(self, seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Module:
        """The model in training mode; the same weights for the same seed."""
        state = torch.get_rng_state()
        try:
            torch.manual_seed(seed)
            return self.factory().to(dtype).train()
        finally:
            torch.set_rng_state(state)

    def example(self, samples: int = 4, seed: int = 1, dtype: torch.dtype = torch.float64) -> Batch:
        found = self.batch(samples, seed)
        return Batch({name: _cast(value, dtype) for name, value in found.inputs.items()}, _cast(found.targets, dtype))


def slice_batch(batch: Batch, start: int, stop: int) -> Batch:
    """The samples from `start` to `stop`, a micro-batch."""
    return Batch(
        {name: _rows(value, start, stop) for name, value in batch.inputs.items()}, _rows(batch.targets, start, stop)
    )


def _rows(value: Any, start: int, stop: int) -> Any:
    if isinstance(value, dict):
        return {name: _rows(each, start, stop) for name, each in value.items()}
    return value[start:stop] if isinstance(value, torch.Tensor) else value


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, dict):
        return {name: _cast(each, dtype) for name, each in value.items()}
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# ---- losses: sums and counts, so that uneven micro-batches are exact ----


def squares(outputs: Any, targets: Any) -> tuple[Any, Any]:
    return ((outputs - targets) ** 2).sum(), torch.tensor(float(outputs.numel()))


def classes(outputs: Any, targets: Any) -> tuple[Any, Any]:
    return F.cross_entropy(outputs, targets, reduction="sum"), torch.tensor(float(len(targets)))


def words(outputs: Any, targets: Any) -> tuple[Any, Any]:
    """Return the summed loss and the number of the words whose target is not IGNORED; logits may be an attribute."""
    logits = getattr(outputs, "logits", outputs)
    total = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORED, reduction="sum")
    return total, (targets != IGNORED).sum().to(total.dtype)


def next_words(outputs: Any, targets: Any) -> tuple[Any, Any]:
    logits = getattr(outputs, "logits", outputs)
    return words(logits[:, :-1], targets[:, 1:])


def balanced(outputs: Any, targets: Any) -> tuple[Any, Any]:
    """Return the summed loss of a mixture of experts: that of its words, and 0.01 of the balance for each word."""
    logits, balance = outputs
    total, count = words(logits, targets)
    return total + 0.01 * balance * count, count


# ---- batches ----


def _vectors(samples: int, seed: int) -> Batch:
    random = _generator(seed)
    return Batch({"x": torch.randn(samples, 12, generator=random)}, torch.randn(samples, 5, generator=random))


def _images(samples: int, seed: int) -> Batch:
    random = _generator(seed)
    images = torch.randn(samples, 3, 16, 16, generator=random)
    return Batch({"images": images}, torch.randint(10, (samples,), generator=random))


def _pictures(samples: int, seed: int) -> Batch:
    random = _generator(seed)
    images = torch.randn(samples, 2, 16, 16, generator=random)
    return Batch({"images": images}, torch.randn(samples, 1, 16, 16, generator=random))


def _text(samples: int, seed: int) -> Batch:
    tokens = torch.randint(WORDS, (samples, 9), generator=_generator(seed))
    return Batch({"input_ids": tokens}, tokens)


def padding(samples: int, length: int, random: torch.Generator) -> Any:
    """1 where there is a word; every sample has another number of them."""
    lengths = torch.randint(length // 2, length + 1, (samples,), generator=random)
    lengths[0] = length // 2  # some padding in every batch
    return (torch.arange(length) < lengths[:, None]).long()


def _masked(samples: int, seed: int) -> Batch:
    random = _generator(seed)
    tokens = torch.randint(1, WORDS, (samples, 10), generator=random)
    mask = padding(samples, 10, random)
    hidden = (torch.rand(samples, 10, generator=random) < 0.3) & (mask == 1)
    hidden[:, 0] = True
    return Batch({"input_ids": tokens.where(~hidden, 0), "attention_mask": mask}, tokens.where(hidden, IGNORED))


def _translation(samples: int, seed: int) -> Batch:
    random = _generator(seed)
    source = torch.randint(1, WORDS, (samples, 8), generator=random)
    target = torch.randint(1, WORDS, (samples, 7), generator=random)
    mask, written = padding(samples, 8, random), padding(samples, 7, random)
    inputs = {"input_ids": source, "attention_mask": mask, "decoder_input_ids": target}
    return Batch(inputs, target.where(written == 1, IGNORED))


def _nested(samples: int, seed: int) -> Batch:
    random = _generator(seed)
    both = {name: torch.randn(samples, 6, generator=random) for name in ("left", "right")}
    return Batch({"pair": both, "scale": 0.5}, torch.randn(samples, 3, generator=random))


def _pair_loss(outputs: Any, targets: Any) -> tuple[Any, Any]:
    total, count = squares(outputs["out"], targets)
    left, (right,) = outputs["inner"]
    return total + (left * right).sum(), count


CASES: dict[str, Case] = {
    case.name: case
    for case in (
        Case("mlp", Mlp, _vectors, squares),
        Case("resnet", ResNet, _images, classes, per_microbatch=True),
        Case("unet", UNet, _pictures, squares),
        Case("gpt", Gpt, _text, next_words),
        Case("gpt-dropout", lambda: Gpt(dropout=0.1), _text, next_words, per_microbatch=True),
        Case("bert", Bert, _masked, words),
        Case("t5", T5, _translation, words),
        Case("llama", Llama, _text, next_words),
        Case("experts", Mixture, _text, balanced, per_microbatch=True),
        Case("custom", Custom, _vectors, squares),
        Case("pair", Pair, _nested, _pair_loss),
    )
}


def gradients(model: nn.Module) -> dict[str, Any]:
    """Return the gradient of each parameter once, by its name in the whole model."""
    return {name: parameter.grad for name, parameter in model.named_parameters()}
