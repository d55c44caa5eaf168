"""Models of unequal parts that are small enough for two processors, with a batch and a loss for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


class TransformerBlock(nn.Module):  # type: ignore[misc]  # torch is not where types are checked
    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.dropout = heads, nn.Dropout(dropout) if dropout else nn.Identity()
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Any) -> Any:
        samples, tokens, width = x.shape
        q, k, v = self.qkv(self.before(x)).view(samples, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind()
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(attended.transpose(1, 2).reshape(samples, tokens, width)))
        return x + self.dropout(self.mlp(self.after(x)))


class Gpt(nn.Module):  # type: ignore[misc]
    """Gives its loss, as models of transformers do with labels; without them the logits."""

    def __init__(self, words: int, width: int, layers: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.h = nn.ModuleList(TransformerBlock(width, width // 64, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, ids: Any, labels: Any = None) -> Any:
        x = self.embed(ids)
        for block in self.h:
            x = block(x)
        logits = self.head(self.norm(x))
        return logits if labels is None else mean_over_words(logits, labels)


def mean_over_words(logits: Any, labels: Any) -> Any:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def convolutions() -> nn.Module:
    """Large pictures in the first layers, many channels in the last: times fall, parameters grow."""
    layers: list[nn.Module] = []
    channels = 3
    for more in (32, 32, 64, 64, 128, 128, 256, 256):
        layers += [nn.Conv2d(channels, more, 3, stride=1 + (more > channels > 3), padding=1), nn.GroupNorm(8, more)]
        layers.append(nn.ReLU())
        channels = more
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 100))


def tower() -> nn.Module:
    """Linear layers of falling width."""
    widths = (1536, 1280, 1024, 1024, 896, 768, 768, 640, 512, 512)
    return nn.Sequential(*(each for a, b in pairwise(widths) for each in (nn.Linear(a, b), nn.Tanh())))


@dataclass(frozen=True)
class Model:
    """`batch(samples)`: inputs by name, and targets. `samples` of a micro-batch."""

    build: Callable[[], nn.Module]
    samples: int
    batch: Callable[[int], tuple[dict[str, Any], Any]]
    loss: Callable[[Any, Any], Any]


def text(words: int, tokens: int) -> Callable[[int], tuple[dict[str, Any], Any]]:
    def batch(samples: int) -> tuple[dict[str, Any], Any]:
        ids = torch.randint(words, (samples, tokens + 1))
        labels = ids[:, 1:].contiguous()
        return {"ids": ids[:, :-1].contiguous(), "labels": labels}, labels

    return batch


MODELS = {
    "gpt": Model(lambda: Gpt(2048, 384, 6), 2, text(2048, 96), lambda loss, labels: loss),
    "convolutions": Model(
        convolutions,
        4,
        lambda samples: ({"input": torch.randn(samples, 3, 48, 48)}, torch.randint(100, (samples,))),
        F.cross_entropy,
    ),
    "tower": Model(
        tower, 256, lambda samples: ({"input": torch.randn(samples, 1536)}, torch.randn(samples, 512)), F.mse_loss
    ),
}
