"""A transformer of the usual kind (pre-norm, causal attention, learned positions), small enough for a CPU."""

from __future__ import annotations

import torch
from torch import Tensor, nn

VOCABULARY = 128  # ASCII


class Block(nn.Module):
    """Attention, then a perceptron, each added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.join = nn.Linear(width, width)
        self.perceptron = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        # (batch, length, 3·width) to three times (batch, heads, length, width/heads)
        parts = self.qkv(self.norm_attention(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.join(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.perceptron(x)


class CharTransformer(nn.Module):
    """Logits over the next character at every position: (batch, length) to (batch, length, VOCABULARY)."""

    def __init__(self, context: int, width: int = 128, heads: int = 4, depth: int = 2) -> None:
        super().__init__()
        self.context = context
        self.characters = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, VOCABULARY))

    def forward(self, text: Tensor) -> Tensor:
        positions = torch.arange(text.shape[1], device=text.device)
        return self.head(self.blocks(self.characters(text) + self.positions(positions)))

    @torch.no_grad()
    def write(self, start: str, length: int, seed: int) -> str:
        """Continue `start` by `length` characters."""
        device = self.positions.weight.device
        torch.manual_seed(seed)
        text = torch.tensor([list(start.encode("ascii"))], device=device)
        for _ in range(length):
            logits = self(text[:, -self.context :])[0, -1]
            following = torch.multinomial((logits / 0.7).softmax(dim=0), 1)
            text = torch.cat([text, following[None]], dim=1)
        return bytes(text[0].tolist()).decode("ascii")
