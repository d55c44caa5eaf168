"""Graphs of well-known models from their published shapes: times from operations counted, for any rate of a device.

What counts is that they are shaped like the real ones: residuals, long skips, branches, heavy heads, shared embeddings.
Two bytes for each number; a matrix product costs as much again for either gradient, all else as much for its input's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from everstep.pipeline.graph import Graph, Node

OPERATIONS = 60e12  # per second, of a matrix product
MEMORY = 1e12  # bytes per second, of everything else
WORD = 2


@dataclass
class Model:
    """Collects nodes; a method gives the name of the value that it made."""

    nodes: list[Node] = field(default_factory=list)
    shared: dict[str, int] = field(default_factory=dict)

    def op(
        self,
        name: str,
        inputs: Sequence[str],
        size: int,
        *,
        operations: float = 0.0,
        weights: int = 0,
        kept: int | None = None,
        tie: str = "",
        gradient: bool = True,
    ) -> str:
        """`size` of the value and `kept` for backward in numbers, `weights` too; of a shared one also `tie`."""
        seconds = operations / OPERATIONS + WORD * size / MEMORY
        if tie:
            self.shared[tie] = WORD * weights
        self.nodes.append(
            Node(
                name,
                tuple(dict.fromkeys(inputs)),
                forward=seconds,
                input_grad=seconds if gradient and inputs else 0.0,
                weight_grad=seconds if weights else 0.0,
                activation=WORD * (size if kept is None else kept),
                parameters=0 if tie else WORD * weights,
                output=WORD * size,
                ties=(tie,) if tie else (),
                gradient=gradient,
            )
        )
        return name

    def linear(self, name: str, source: str, rows: int, width: int, out: int, tie: str = "") -> str:
        return self.op(name, [source], rows * out, operations=2.0 * rows * width * out, weights=width * out, tie=tie)

    def conv(self, name: str, source: str, side: int, channels: int, out: int, kernel: int = 3, batch: int = 8) -> str:
        """A convolution with its normalisation and activation; `side` of the result."""
        size, weights = batch * side * side * out, kernel * kernel * channels * out
        return self.op(
            name, [source], size, operations=2.0 * batch * side * side * weights, weights=weights, kept=3 * size
        )

    def graph(self) -> Graph:
        return Graph(tuple(self.nodes), tuple(self.shared.items()))


@dataclass(frozen=True)
class Shape:
    """Of a transformer: samples of a micro-batch, tokens of a sample, width, inner width, heads, vocabulary."""

    batch: int = 2
    tokens: int = 1024
    width: int = 1024
    inner: int = 4096
    heads: int = 16
    words: int = 50257

    @property
    def rows(self) -> int:
        return self.batch * self.tokens


def attention(model: Model, name: str, source: str, shape: Shape, *, memory: str = "", mask: str = "") -> str:
    """With three projections of its own; keys and values from `memory` if it is given."""
    rows, width = shape.rows, shape.width
    query = model.linear(f"{name}.q", source, rows, width, width)
    key = model.linear(f"{name}.k", memory or source, rows, width, width)
    value = model.linear(f"{name}.v", memory or source, rows, width, width)
    inputs = [query, key, value, *([mask] if mask else [])]
    operations = 4.0 * rows * shape.tokens * width
    mixed = model.op(f"{name}.mix", inputs, rows * width, operations=operations, kept=2 * rows * width)
    return model.linear(f"{name}.o", mixed, rows, width, width)


def block(model: Model, name: str, source: str, shape: Shape, *, memory: str = "", mask: str = "") -> str:
    """Attention (to `memory` too) and two projections, each around a residual."""
    size = shape.rows * shape.width
    parts: list[Callable[[str], str]] = [lambda x: attention(model, f"{name}.attn", x, shape, mask=mask)]
    if memory:
        parts.append(lambda x: attention(model, f"{name}.cross", x, shape, memory=memory))
    parts.append(lambda x: feed_forward(model, f"{name}.mlp", x, shape))
    for index, part in enumerate(parts):
        norm = model.op(f"{name}.norm{index}", [source], size, weights=shape.width)
        source = model.op(f"{name}.add{index}", [source, part(norm)], size, kept=0)
    return source


def feed_forward(model: Model, name: str, source: str, shape: Shape) -> str:
    up = model.linear(f"{name}.up", source, shape.rows, shape.width, shape.inner)
    act = model.op(f"{name}.act", [up], shape.rows * shape.inner)
    return model.linear(f"{name}.down", act, shape.rows, shape.inner, shape.width)


def embed(model: Model, name: str, shape: Shape, tie: str) -> str:
    return model.op(name, [], shape.rows * shape.width, weights=shape.words * shape.width, tie=tie)


def decoder(layers: int, shape: Shape, *, tied: bool) -> Graph:
    """GPT-2 and Llama: one stack, a head over the vocabulary."""
    model = Model()
    here = embed(model, "embed", shape, "embed.weight" if tied else "")
    if not tied:
        model.nodes[-1] = Node(
            "embed", (), 1e-4, 0, 1e-4, 0, WORD * shape.words * shape.width, WORD * shape.rows * shape.width
        )
    for layer in range(layers):
        here = block(model, f"h.{layer}", here, shape)
    here = model.op("norm", [here], shape.rows * shape.width, weights=shape.width)
    model.linear("head", here, shape.rows, shape.width, shape.words, tie="embed.weight" if tied else "")
    return model.graph()


def bert(layers: int, shape: Shape) -> Graph:
    model = Model()
    mask = model.op("mask", [], shape.batch * shape.tokens**2, gradient=False, kept=0)
    here = embed(model, "embed", shape, "embed.weight")
    for layer in range(layers):
        here = block(model, f"layer.{layer}", here, shape, mask=mask)
    here = model.linear("transform", here, shape.rows, shape.width, shape.width)
    model.linear("head", here, shape.rows, shape.width, shape.words, tie="embed.weight")
    return model.graph()


def encoder_decoder(encoders: int, decoders: int, shape: Shape, *, convs: int = 0) -> Graph:
    """T5; with `convs` as the encoder's first layers, Whisper."""
    model = Model()
    rows, width = shape.rows, shape.width
    here = "" if convs else embed(model, "encoder.embed", shape, "embed.weight")
    for index in range(convs):
        operations = 6.0 * rows * width * width
        here = model.op(
            f"encoder.conv{index}", [here] if here else [], rows * width, operations=operations, weights=3 * width**2
        )
    for layer in range(encoders):
        here = block(model, f"encoder.{layer}", here, shape)
    memory = model.op("encoder.norm", [here], rows * width, weights=width)
    here = embed(model, "decoder.embed", shape, "embed.weight")
    for layer in range(decoders):
        here = block(model, f"decoder.{layer}", here, shape, memory=memory)
    here = model.op("decoder.norm", [here], rows * width, weights=width)
    model.linear("head", here, rows, width, shape.words, tie="embed.weight")
    return model.graph()


def mixture(layers: int, experts: int, shape: Shape) -> Graph:
    """Each token goes to two of the experts; each expert is a node."""
    model = Model()
    size = shape.rows * shape.width
    here = embed(model, "embed", shape, "embed.weight")
    each = Shape(shape.batch, shape.tokens * 2 // experts, shape.width, shape.inner)
    for layer in range(layers):
        norm = model.op(f"{layer}.norm", [here], size, weights=shape.width)
        here = model.op(f"{layer}.add", [here, attention(model, f"{layer}.attn", norm, shape)], size, kept=0)
        gate = model.op(f"{layer}.gate", [here], size, weights=experts * shape.width)
        made = []
        for expert in range(experts):
            operations = 6.0 * each.rows * each.width * each.inner
            weights = 3 * each.width * each.inner
            made.append(
                model.op(
                    f"{layer}.expert{expert}", [gate], each.rows * each.width, operations=operations, weights=weights
                )
            )
        here = model.op(f"{layer}.sum", [here, *made], size)
    model.linear("head", here, shape.rows, shape.width, shape.words, tie="embed.weight")
    return model.graph()


def towers(layers: int, shape: Shape) -> Graph:
    """CLIP: two stacks that meet in the loss."""
    model = Model()
    ends = []
    for name in ("text", "image"):
        here = model.op(f"{name}.embed", [], shape.rows * shape.width, weights=shape.width * 512)
        for layer in range(layers):
            here = block(model, f"{name}.{layer}", here, shape)
        ends.append(model.op(f"{name}.pool", [here], shape.batch * shape.width))
    model.op("similarity", ends, shape.batch**2)
    return model.graph()


def resnet50() -> Graph:
    model = Model()
    here = model.conv("stem", model.op("image", [], 8 * 3 * 224**2, gradient=False), 112, 3, 64, 7)
    channels = 64
    for group, (count, width, side) in enumerate(((3, 64, 56), (4, 128, 28), (6, 256, 14), (3, 512, 7))):
        for index in range(count):
            name = f"layer{group}.{index}"
            first = model.conv(f"{name}.a", here, side, channels, width, 1)
            second = model.conv(f"{name}.b", first, side, width, width)
            third = model.conv(f"{name}.c", second, side, width, 4 * width, 1)
            short = here if index else model.conv(f"{name}.down", here, side, channels, 4 * width, 1)
            here = model.op(f"{name}.add", [third, short], 8 * side**2 * 4 * width)
            channels = 4 * width
    model.linear("head", model.op("pool", [here], 8 * channels), 8, channels, 1000)
    return model.graph()


def vgg16() -> Graph:
    model = Model()
    here, channels, side = model.op("image", [], 8 * 3 * 224**2, gradient=False), 3, 224
    for index, width in enumerate((64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512)):
        if index in (2, 4, 7, 10):
            side //= 2
        here, channels = model.conv(f"conv{index}", here, side, channels, width), width
    for index, (width, out) in enumerate(((25088, 4096), (4096, 4096), (4096, 1000))):
        here = model.linear(f"fc{index}", here, 8, width, out)
    return model.graph()


def unet(depth: int = 5, width: int = 64) -> Graph:
    """Long skips from each level of the way down to that of the way up."""
    model = Model()
    here, channels, side = model.op("image", [], 8 * 3 * 192**2, gradient=False), 3, 192
    skips = []
    for level in range(depth):
        for index in range(2):
            here, channels = model.conv(f"down{level}.{index}", here, side, channels, width << level), width << level
        skips.append(here)
        side //= 2
    here = model.conv("middle", here, side, channels, channels)
    for level in reversed(range(depth)):
        side *= 2
        merged = model.op(f"up{level}.cat", [here, skips[level]], 16 * side**2 * (width << level))
        for index in range(2):
            out = width << level
            merged = model.conv(f"up{level}.{index}", merged, side, channels if index else channels + out, out)
            channels = out
        here = merged
    model.conv("head", here, side, channels, 2, 1)
    return model.graph()


def inception() -> Graph:
    """Nine modules of four branches each: many downsets."""
    model = Model()
    here = model.conv("stem", model.op("image", [], 8 * 3 * 224**2, gradient=False), 28, 64, 192)
    channels, side = 192, 28
    for index, out in enumerate((256, 480, 512, 512, 512, 528, 832, 832, 1024)):
        side = 28 if index < 2 else 14 if index < 7 else 7
        name, part = f"mixed{index}", out // 4
        ends = [model.conv(f"{name}.one", here, side, channels, part, 1)]
        for branch, kernel in (("three", 3), ("five", 5)):
            reduced = model.conv(f"{name}.{branch}a", here, side, channels, part // 2, 1)
            ends.append(model.conv(f"{name}.{branch}b", reduced, side, part // 2, part, kernel))
        pooled = model.op(f"{name}.pool", [here], 8 * side**2 * channels)
        ends.append(model.conv(f"{name}.pooled", pooled, side, channels, part, 1))
        here, channels = model.op(f"{name}.cat", ends, 8 * side**2 * out), out
    model.linear("head", here, 8, channels, 1000)
    return model.graph()


def densenet() -> Graph:
    """DenseNet-121: in a block every layer uses what all before it made."""
    model = Model()
    here = model.conv("stem", model.op("image", [], 8 * 3 * 224**2, gradient=False), 56, 3, 64, 7)
    channels, side = 64, 56
    for number, count in enumerate((6, 12, 24, 16)):
        made = [here]
        for index in range(count):
            name = f"block{number}.{index}"
            joined = model.op(f"{name}.cat", made, 8 * side**2 * channels)
            inner = model.conv(f"{name}.a", joined, side, channels, 128, 1)
            made.append(model.conv(f"{name}.b", inner, side, 128, 32))
            channels += 32
        side //= 2
        here = model.op(f"trans{number}.cat", made, 8 * (2 * side) ** 2 * channels)
        here = model.conv(f"trans{number}.conv", here, side, channels, channels // 2, 1)
        channels //= 2
    model.linear("head", here, 8, channels, 1000)
    return model.graph()


MODELS: dict[str, Callable[[], Graph]] = {
    "GPT-2 medium": lambda: decoder(24, Shape(), tied=True),
    "Llama 7B": lambda: decoder(32, Shape(1, 2048, 4096, 11008, 32, 32000), tied=False),
    "Llama 1B, 128k words": lambda: decoder(16, Shape(1, 2048, 2048, 8192, 32, 128256), tied=True),
    "BERT large": lambda: bert(24, Shape(4, 512, words=30522)),
    "T5 base": lambda: encoder_decoder(12, 12, Shape(4, 512, 768, 3072, 12, 32128)),
    "Whisper small": lambda: encoder_decoder(12, 12, Shape(4, 448, 768, 3072, 12, 51865), convs=2),
    "mixture of 8 experts": lambda: mixture(12, 8, Shape(2, 1024, 1024, 3584, 16, 32000)),
    "CLIP": lambda: towers(12, Shape(8, 77, 512, 2048, 8)),
    "ResNet-50": resnet50,
    "VGG-16": vgg16,
    "U-Net": unet,
    "Inception": inception,
    "DenseNet-121": densenet,
}
