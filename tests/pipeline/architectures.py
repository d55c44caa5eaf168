"""The modules of `models`: plain torch, tiny, each with what its kind is known for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

WORDS = 61  # of every vocabulary


class Mlp(nn.Sequential):  # type: ignore[misc]  # torch is not where types are checked
    def __init__(self, depth: int = 6, width: int = 16) -> None:
        layers: list[nn.Module] = [nn.Linear(12, width), nn.Tanh()]
        for _ in range(depth - 2):
            layers += [nn.Linear(width, width), nn.Tanh()]
        super().__init__(*layers, nn.Linear(width, 5))

    def forward(self, x: Any) -> Any:
        return super().forward(x)


class Basic(nn.Module):  # type: ignore[misc]
    """A residual block with batch statistics, in-place activations and an in-place sum."""

    def __init__(self, inside: int, outside: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outside)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outside)
        self.downsample: nn.Module | None = None
        if stride != 1 or inside != outside:
            self.downsample = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x: Any) -> Any:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        return self.relu(out)


class ResNet(nn.Module):  # type: ignore[misc]
    """ResNet-18, narrow; its activation is one module that is called in many places."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = nn.Sequential(Basic(width, width), Basic(width, width))
        self.layer2 = nn.Sequential(Basic(width, 2 * width, 2), Basic(2 * width, 2 * width))
        self.layer3 = nn.Sequential(Basic(2 * width, 4 * width, 2), Basic(4 * width, 4 * width))
        self.layer4 = nn.Sequential(Basic(4 * width, 8 * width, 2), Basic(8 * width, 8 * width))
        self.fc = nn.Linear(8 * width, 10)

    def forward(self, images: Any) -> Any:
        x = self.relu(self.bn1(self.conv1(images)))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))


class UNet(nn.Module):  # type: ignore[misc]
    """A U-Net: outputs of the first layer go to the last, which makes skips over all stages."""

    def __init__(self, width: int = 4, depth: int = 3) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(depth + 1)]
        self.stem = self._double(2, width)
        self.down = nn.ModuleList(self._double(widths[i], widths[i + 1]) for i in range(depth))
        self.up = nn.ModuleList(nn.ConvTranspose2d(widths[i + 1], widths[i], 2, 2) for i in reversed(range(depth)))
        self.merge = nn.ModuleList(self._double(2 * widths[i], widths[i]) for i in reversed(range(depth)))
        self.head = nn.Conv2d(width, 1, 1)

    @staticmethod
    def _double(inside: int, outside: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(inside, outside, 3, padding=1), nn.GroupNorm(2, outside), nn.SiLU(inplace=True))

    def forward(self, images: Any) -> Any:
        x = self.stem(images)
        skips = []
        for down in self.down:
            skips.append(x)
            x = down(F.max_pool2d(x, 2))
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat([skips.pop(), up(x)], dim=1))
        return self.head(x)


class Attention(nn.Module):  # type: ignore[misc]
    """Self attention, or attention to `memory`; `mask` is added to the scores; `turn` is a rotary table (cos, sin)."""

    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Any, memory: Any = None, mask: Any = None, turn: Any = None) -> Any:
        batch, length, width = x.shape
        query = self.query(x).view(batch, length, self.heads, -1).transpose(1, 2)
        key, value = self.key_value(x if memory is None else memory).chunk(2, dim=-1)
        key, value = (each.view(batch, -1, self.heads, width // self.heads).transpose(1, 2) for each in (key, value))
        if turn is not None:
            query, key = rotate(query, *turn), rotate(key, *turn)
        scores = query @ key.transpose(-1, -2) / math.sqrt(width // self.heads)
        if mask is not None:
            scores = scores + mask
        weights = F.dropout(scores.softmax(-1), self.dropout, self.training)
        return self.out((weights @ value).transpose(1, 2).reshape(batch, length, width))


def rotate(x: Any, cos: Any, sin: Any) -> Any:
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


def causal(length: int, like: Any) -> Any:
    return torch.full((length, length), float("-inf"), dtype=like.dtype, device=like.device).triu(1)


class Block(nn.Module):  # type: ignore[misc]
    def __init__(self, width: int = 16, heads: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: Any, mask: Any = None, turn: Any = None) -> Any:
        x = x + self.attention(self.ln_1(x), mask=mask, turn=turn)
        return x + self.mlp(self.ln_2(x))


class Gpt(nn.Module):  # type: ignore[misc]
    """A decoder whose head is its embedding: one parameter in the first and the last stage."""

    def __init__(self, depth: int = 4, width: int = 16, dropout: float = 0.0) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(WORDS, width), nn.Embedding(32, width)
        self.drop = nn.Dropout(dropout)
        self.h = nn.ModuleList(Block(width, 2, dropout) for _ in range(depth))
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, WORDS, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, input_ids: Any) -> Any:
        length = input_ids.shape[1]
        x = self.wte(input_ids) + self.wpe(torch.arange(length, device=input_ids.device))
        x = self.drop(x)
        mask = causal(length, x)
        for block in self.h:
            x = block(x, mask)
        return self.lm_head(self.ln_f(x))


class Bert(nn.Module):  # type: ignore[misc]
    """An encoder with padding: its mask is made once, and used by every layer."""

    def __init__(self, depth: int = 4, width: int = 16) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(WORDS, width), nn.Embedding(32, width)
        self.norm = nn.LayerNorm(width)
        self.layers = nn.ModuleList(Block(width) for _ in range(depth))
        self.transform = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width))
        self.bias = nn.Parameter(torch.zeros(WORDS))
        self.register_buffer("position_ids", torch.arange(32))

    def forward(self, input_ids: Any, attention_mask: Any) -> Any:
        x = self.norm(self.words(input_ids) + self.positions(self.position_ids[: input_ids.shape[1]]))
        mask = (1.0 - attention_mask[:, None, None, :].to(x.dtype)) * -1e4
        for layer in self.layers:
            x = layer(x, mask=mask)
        return F.linear(self.transform(x), self.words.weight, self.bias)


class Bias(nn.Module):  # type: ignore[misc]
    """T5's relative positions: a table made by the first layer, handed through all of them."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.table = nn.Embedding(8, heads)

    def forward(self, length: int, device: Any) -> Any:
        places = torch.arange(length, device=device)
        return self.table((places[None, :] - places[:, None]).clamp(-4, 3) + 4).permute(2, 0, 1).unsqueeze(0)


class Encoder(nn.Module):  # type: ignore[misc]
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), Attention(width, 2)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Any, mask: Any) -> Any:
        x = x + self.attention(self.norm(x), mask=mask)
        return x + self.mlp(x)


class Decoder(nn.Module):  # type: ignore[misc]
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), Attention(width, 2)
        self.cross_norm, self.cross = nn.LayerNorm(width), Attention(width, 2)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Any, memory: Any, mask: Any, cross_mask: Any) -> Any:
        x = x + self.attention(self.norm(x), mask=mask)
        x = x + self.cross(self.cross_norm(x), memory=memory, mask=cross_mask)
        return x + self.mlp(x)


class T5(nn.Module):  # type: ignore[misc]
    """Encoder and decoder: every layer of the decoder uses the encoder's last value; one embedding in three places."""

    def __init__(self, depth: int = 3, width: int = 16) -> None:
        super().__init__()
        self.shared = nn.Embedding(WORDS, width)
        self.encoder_bias, self.decoder_bias = Bias(2), Bias(2)
        self.encoder = nn.ModuleList(Encoder(width) for _ in range(depth))
        self.decoder = nn.ModuleList(Decoder(width) for _ in range(depth))
        self.encoder_norm, self.decoder_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, WORDS, bias=False)
        self.lm_head.weight = self.shared.weight

    def forward(self, input_ids: Any, attention_mask: Any, decoder_input_ids: Any) -> Any:
        memory = self.shared(input_ids)
        padded = (1.0 - attention_mask[:, None, None, :].to(memory.dtype)) * -1e4
        mask = padded + self.encoder_bias(input_ids.shape[1], input_ids.device)
        for layer in self.encoder:
            memory = layer(memory, mask)
        memory = self.encoder_norm(memory)
        x = self.shared(decoder_input_ids)
        mask = causal(x.shape[1], x) + self.decoder_bias(x.shape[1], x.device)
        for layer in self.decoder:
            x = layer(x, memory, mask, padded)
        return self.lm_head(self.decoder_norm(x))


class Llama(nn.Module):  # type: ignore[misc]
    """Rotary tables: buffers that no state dict has, from which each call takes as many rows as the text is long."""

    def __init__(self, depth: int = 4, width: int = 16) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(WORDS, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.RMSNorm(width)
        self.lm_head = nn.Linear(width, WORDS, bias=False)
        angles = torch.arange(32)[:, None] / 10000 ** (torch.arange(4) / 4)[None, :]
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, input_ids: Any) -> Any:
        x = self.embed_tokens(input_ids)
        length = x.shape[1]
        turn = self.cos[:length].to(x.dtype), self.sin[:length].to(x.dtype)
        mask = causal(length, x)
        for layer in self.layers:
            x = layer(x, mask, turn=turn)
        return self.lm_head(self.norm(x))


class Experts(nn.Module):  # type: ignore[misc]
    """A mixture of experts: the data decides which expert works on which word, which no trace can know."""

    def __init__(self, width: int, experts: int = 3, chosen: int = 2) -> None:
        super().__init__()
        self.chosen = chosen
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width)) for _ in range(experts)
        )

    def forward(self, x: Any) -> tuple[Any, Any]:
        flat = x.reshape(-1, x.shape[-1])
        odds = self.router(flat).softmax(-1)
        weights, choice = odds.topk(self.chosen, dim=-1)
        result = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            rows, places = (choice == index).nonzero(as_tuple=True)
            if len(rows) == 0:
                continue
            result = result.index_add(0, rows, expert(flat[rows]) * weights[rows, places, None])
        share = F.one_hot(choice, len(self.experts)).to(odds.dtype).mean((0, 1))
        return result.reshape(x.shape), len(self.experts) * (share * odds.mean(0)).sum()


class Mixture(nn.Module):  # type: ignore[misc]
    """A decoder with experts; gives its logits, and how unbalanced its experts are."""

    def __init__(self, depth: int = 3, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.attention = nn.ModuleList(Attention(width, 2) for _ in range(depth))
        self.experts = nn.ModuleList(Experts(width) for _ in range(depth))
        self.head = nn.Linear(width, WORDS)

    def forward(self, input_ids: Any) -> tuple[Any, Any]:
        x = self.embed(input_ids)
        mask = causal(x.shape[1], x)
        total = torch.zeros((), dtype=x.dtype, device=x.device)
        for attention, experts in zip(self.attention, self.experts, strict=True):
            x = x + attention(x, mask=mask)
            found, balance = experts(x)
            x, total = x + found, total + balance
        return self.head(x), total


class Bend(torch.autograd.Function):  # type: ignore[misc]
    """Its gradient is no derivative of its value: whoever differentiates what it computes instead is found out."""

    @staticmethod
    def forward(ctx: Any, x: Any, scale: float) -> Any:
        ctx.save_for_backward(x)
        ctx.scale = scale
        return x.clamp(-1, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, None]:
        (x,) = ctx.saved_tensors
        return gradient * ctx.scale * torch.sigmoid(x), None


class Custom(nn.Module):  # type: ignore[misc]
    """Custom autograd functions inside and between modules, activations in place on values and on views of them."""

    def __init__(self, width: int = 16, depth: int = 4) -> None:
        super().__init__()
        self.inside = nn.Linear(12, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.outside = nn.Linear(width, 5)

    def forward(self, x: Any) -> Any:
        x = self.inside(x)
        for index, layer in enumerate(self.layers):
            x = Bend.apply(layer(x), 0.5 + index)
            x = x * 1.5
            left, right = x[:, : x.shape[1] // 2], x[:, x.shape[1] // 2 :]
            x[:, 0] += 1.0
            x.relu_()
            x = torch.cat([right, left.tanh()], dim=-1)
        return self.outside(x)


class Pair(nn.Module):  # type: ignore[misc]
    """Nested arguments, a number among them, nested results."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.both = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, pair: Mapping[str, Any], scale: float = 1.0) -> dict[str, Any]:
        left, right = self.left(pair["left"]).tanh(), self.right(pair["right"]).tanh()
        return {"out": self.both(left * scale + right), "inner": (left, [right])}
