"""Traces well-known models at their published sizes, without weights, and counts what each node costs.

`python -m tests.pipeline.graphs.make [NAME …]` (with torch and transformers) writes the files beside this one. Times
are counted operations, so they are the same wherever this is run.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from torch import nn

from everstep.pipeline.frontend import trace_model
from everstep.pipeline.frontend.split import node_modules
from everstep.pipeline.graph import VERSION, Graph, GraphNode
from everstep.pipeline.profile_counted import count_costs

FOLDER = Path(__file__).parent
Example = dict[str, Any]


def tokens(samples: int, length: int, *names: str) -> Example:
    return {name: torch.zeros(samples, length, dtype=torch.long) for name in names or ("input_ids",)}


def pixels(samples: int, side: int = 224, name: str = "pixel_values") -> Example:
    return {name: torch.zeros(samples, 3, side, side)}


class Vgg(nn.Sequential):  # type: ignore[misc]  # torch is not where types are checked
    """VGG-16 with batch normalisation."""

    def __init__(self) -> None:
        layers: list[nn.Module] = []
        channels = 3
        for width in (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0):
            if width:
                layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
                channels = width
            else:
                layers.append(nn.MaxPool2d(2))
        layers += [nn.Flatten(), nn.Linear(25088, 4096), nn.ReLU(inplace=True), nn.Linear(4096, 4096)]
        super().__init__(*layers, nn.ReLU(inplace=True), nn.Linear(4096, 1000))


class Unet(nn.Module):  # type: ignore[misc]
    """As published: long skips from each level of the way down to that of the way up."""

    def __init__(self, width: int = 64, depth: int = 4) -> None:
        super().__init__()
        widths = [width << level for level in range(depth + 1)]
        self.down = nn.ModuleList(self.pair(before, after) for before, after in zip([3, *widths], widths, strict=False))
        self.pool = nn.MaxPool2d(2)
        self.lift = nn.ModuleList(nn.ConvTranspose2d(2 * each, each, 2, 2) for each in widths[-2::-1])
        self.up = nn.ModuleList(self.pair(2 * each, each) for each in widths[-2::-1])
        self.head = nn.Conv2d(width, 2, 1)

    @staticmethod
    def pair(before: int, after: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(before, after, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(after, after, 3, padding=1),
            nn.ReLU(inplace=True),
        )

    def forward(self, x: Any) -> Any:
        skips: list[Any] = []
        for level in self.down:
            x = level(self.pool(x) if skips else x)
            skips.append(x)
        skips.pop()
        for lift, level in zip(self.lift, self.up, strict=True):
            x = level(torch.cat([skips.pop(), lift(x)], 1))
        return self.head(x)


#: The model, and a micro-batch.
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Example]]] = {
    "gpt2": (lambda: hf.GPT2LMHeadModel(hf.GPT2Config(use_cache=False)), lambda: tokens(4, 1024)),
    "llama-3.2-1b": (
        lambda: hf.LlamaForCausalLM(
            hf.LlamaConfig(
                vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16,
                num_attention_heads=32, num_key_value_heads=8, tie_word_embeddings=True, use_cache=False,
            )
        ),
        lambda: tokens(2, 1024),
    ),
    "llama-2-7b": (
        lambda: hf.LlamaForCausalLM(hf.LlamaConfig(use_cache=False)),
        lambda: tokens(2, 1024),
    ),
    "mixtral": (  # smaller: what depends on data is run once
        lambda: hf.MixtralForCausalLM(
            hf.MixtralConfig(
                hidden_size=1024, intermediate_size=2048, num_hidden_layers=8, num_attention_heads=16,
                num_key_value_heads=4, num_local_experts=8, use_cache=False, experts_implementation="eager",
            )
        ),
        lambda: tokens(2, 128),
    ),
    "gemma-2b": (
        lambda: hf.GemmaForCausalLM(
            hf.GemmaConfig(
                vocab_size=256000, hidden_size=2048, intermediate_size=16384, num_hidden_layers=18,
                num_attention_heads=8, num_key_value_heads=1, head_dim=256, use_cache=False,
            )
        ),
        lambda: tokens(2, 512),
    ),
    "bert-large": (
        lambda: hf.BertForMaskedLM(
            hf.BertConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)
        ),
        lambda: tokens(4, 512),
    ),
    "t5-base": (
        lambda: hf.T5ForConditionalGeneration(
            # Each stack calls its dropout at both ends; a module that draws random numbers is in one stage.
            hf.T5Config(d_model=768, d_ff=3072, num_layers=12, num_heads=12, use_cache=False, dropout_rate=0.0)
        ),
        lambda: {**tokens(8, 512, "input_ids", "decoder_input_ids"), "use_cache": False},
    ),
    "vit-base": (
        lambda: hf.ViTForImageClassification(hf.ViTConfig(num_labels=1000)),
        lambda: pixels(32),
    ),
    "clip": (lambda: hf.CLIPModel(hf.CLIPConfig()), lambda: {**tokens(32, 77), **pixels(32)}),
    "resnet-50": (lambda: hf.ResNetForImageClassification(hf.ResNetConfig(num_labels=1000)), lambda: pixels(32)),
    "convnext-tiny": (
        lambda: hf.ConvNextForImageClassification(hf.ConvNextConfig(num_labels=1000)),
        lambda: pixels(32),
    ),
    "vgg-16": (Vgg, lambda: pixels(32, name="input")),
    "u-net": (Unet, lambda: pixels(4, 256, name="x")),
}  # fmt: skip


def made(name: str) -> Graph:
    model, example = MODELS[name]
    with torch.device("meta"):
        module, inputs = model(), example()
    traced = trace_model(module, inputs)
    return count_costs(traced.graph, node_modules(traced), inputs).graph


def compact(graph: Graph) -> str:
    """A line for each node, without what is left at its default; seconds to four digits."""
    lines = []
    for node in graph.nodes:
        own = {
            field.name: float(f"{value:.4g}") if isinstance(value, float) else value
            for field in fields(GraphNode)
            if (value := getattr(node, field.name)) != field.default or field.default is MISSING
        }
        lines.append(json.dumps(own))
    nodes = ",\n".join(lines)
    return (
        f'{{"everstep": "graph", "version": {VERSION}, "shared": {json.dumps(graph.shared)}, "nodes": [\n{nodes}\n]}}\n'
    )


def main(names: list[str]) -> None:
    for name in names or MODELS:
        graph = made(name)
        (FOLDER / f"{name}.json").write_text(compact(graph))
        work = sum(node.forward + node.backward for node in graph.nodes)
        print(f"{name:<16}{len(graph.nodes):>6} nodes {work * 1e3:>10.3f} ms", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
