"""The models of `models` cut by hand: what the engine is tested with, whatever a front end makes of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from everstep.pipeline.graph import Edge, Stage, StageGraph
from tests.pipeline.architectures import causal


@dataclass(frozen=True)
class Step:
    """Makes the value `name` from `inputs`; `run(model, *inputs)` uses the modules and parameters named in `uses`."""

    name: str
    inputs: tuple[str, ...]
    uses: tuple[str, ...]
    run: Callable[..., Any]


class Part:
    """Some steps as a stage; a RunnableStage."""

    def __init__(self, model: nn.Module, steps: Sequence[Step], outputs: Sequence[str]) -> None:
        made = {step.name for step in steps}
        self.steps = steps
        self.inputs = tuple(dict.fromkeys(name for step in steps for name in step.inputs if name not in made))
        self.outputs = tuple(outputs)
        self.module = gather(model, [name for step in steps for name in step.uses])

    def __call__(self, values: Mapping[str, Any]) -> dict[str, Any]:
        known = dict(values)
        for step in self.steps:
            known[step.name] = step.run(self.module, *(known[name] for name in step.inputs))
        return {name: known[name] for name in self.outputs}


def gather(model: nn.Module, names: Sequence[str]) -> nn.Module:
    """A module that has these modules and parameters of `model` under their names."""
    root = nn.Module().train(model.training)
    for name in dict.fromkeys(names):
        *path, last = name.split(".")
        place, origin = root, model
        for word in path:
            origin = getattr(origin, word)
            if not hasattr(place, word):
                place.add_module(word, nn.Module())
            place = getattr(place, word)
        setattr(place, last, getattr(origin, last))
    return root


def cut(model: nn.Module, steps: Sequence[Step], stages: int) -> tuple[list[Part], StageGraph]:
    """`steps` in `stages` runs of about equal length, and what flows between them."""
    starts = [len(steps) * index // stages for index in range(stages + 1)]
    groups = [steps[start:stop] for start, stop in pairwise(starts)]
    home = {step.name: index for index, group in enumerate(groups) for step in group}
    users: dict[str, set[int]] = {}
    for index, group in enumerate(groups):
        for step in group:
            for name in step.inputs:
                if name in home and home[name] != index:
                    users.setdefault(name, set()).add(index)
    edges = tuple(
        Edge(name, home[name], tuple(sorted(users[name])), 1)
        for group in groups
        for name in (step.name for step in group)
        if name in users
    )
    parts = [
        Part(
            model,
            group,
            [
                *(s.name for s in group if s.name in users),
                *(["output"] if "output" in home and home["output"] == i else []),
            ],
        )
        for i, group in enumerate(groups)
    ]
    owners: dict[str, list[int]] = {}
    seen: dict[Any, str] = {}
    for index, part in enumerate(parts):
        for name, parameter in part.module.named_parameters():
            owners.setdefault(seen.setdefault(parameter, name), []).append(index)
    ties = tuple((name, tuple(stages)) for name, stages in sorted(owners.items()) if len(stages) > 1)
    return parts, StageGraph((Stage(),) * stages, edges, ties)


def recipe(name: str, model: nn.Module) -> list[Step]:
    """Return the steps that compute the model of the case `name`, in the order in which values come about."""
    return RECIPES[name.split("-")[0]](model)


def _called(name: str, inputs: tuple[str, ...], module: str) -> Step:
    return Step(name, inputs, (module,), lambda m, *values: m.get_submodule(module)(*values))


def _chain(first: str, modules: Sequence[str]) -> list[Step]:
    names = [first, *(f"v{index}" for index in range(len(modules) - 1)), "output"]
    return [_called(names[i + 1], (names[i],), module) for i, module in enumerate(modules)]


def _mlp(model: Any) -> list[Step]:
    return _chain("input:x", [str(index) for index in range(len(model))])


def _resnet(model: Any) -> list[Step]:
    blocks = [f"layer{i}.{j}" for i in (1, 2, 3, 4) for j in (0, 1)]
    names = ["stem", *blocks]
    head = lambda m, x: m.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))  # noqa: E731
    # A residual block works on its input in place: the value before it is its own.
    return [
        Step("stem", ("input:images",), ("conv1", "bn1"), lambda m, x: F.relu(m.bn1(m.conv1(x)))),
        *(_called(name, (before,), name) for before, name in zip(names, blocks, strict=False)),
        Step("output", (names[-1],), ("fc",), head),
    ]


def _unet(model: Any) -> list[Step]:
    depth = len(model.down)
    steps = [_called("s0", ("input:images",), "stem")]
    for i in range(depth):
        steps.append(
            Step(f"s{i + 1}", (f"s{i}",), (f"down.{i}",), lambda m, x, i=i: getattr(m.down, str(i))(F.max_pool2d(x, 2)))
        )
    x = f"s{depth}"
    for i in range(depth):
        steps.append(_called(f"u{i}", (x,), f"up.{i}"))
        steps.append(
            Step(
                f"m{i}",
                (f"s{depth - 1 - i}", f"u{i}"),
                (f"merge.{i}",),
                lambda m, skip, up, i=i: getattr(m.merge, str(i))(torch.cat([skip, up], dim=1)),
            )
        )
        x = f"m{i}"
    return [*steps, _called("output", (x,), "head")]


def _gpt(model: Any) -> list[Step]:
    def embed(m: Any, tokens: Any) -> Any:
        x = m.drop(m.wte(tokens) + m.wpe(torch.arange(tokens.shape[1])))
        return {"x": x, "mask": causal(tokens.shape[1], x), "tokens": (tokens, "told")}

    def block(m: Any, before: Any, index: int) -> Any:
        return {**before, "x": getattr(m.h, str(index))(before["x"], before["mask"])}

    steps = [Step("e", ("input:input_ids",), ("wte", "wpe", "drop"), embed)]
    before = "e"
    for i in range(len(model.h)):
        steps.append(Step(f"b{i}", (before,), (f"h.{i}",), lambda m, x, i=i: block(m, x, i)))
        before = f"b{i}"
    head = lambda m, x: F.linear(m.ln_f(x["x"]), m.wte.weight)  # noqa: E731
    return [*steps, Step("output", (before,), ("ln_f", "wte"), head)]


def _bert(model: Any) -> list[Step]:
    def embed(m: Any, tokens: Any) -> Any:
        return m.norm(m.words(tokens) + m.positions(m.position_ids[: tokens.shape[1]]))

    def mask(m: Any, x: Any, given: Any) -> Any:
        return (1.0 - given[:, None, None, :].to(x.dtype)) * -1e4

    steps = [
        Step("e", ("input:input_ids",), ("words", "positions", "norm", "position_ids"), embed),
        Step("mask", ("e", "input:attention_mask"), (), mask),
    ]
    before = "e"
    for i in range(len(model.layers)):
        layer = lambda m, x, mask, i=i: getattr(m.layers, str(i))(x, mask=mask)  # noqa: E731
        steps.append(Step(f"l{i}", (before, "mask"), (f"layers.{i}",), layer))
        before = f"l{i}"
    head = lambda m, x: F.linear(m.transform(x), m.words.weight, m.bias)  # noqa: E731
    return [*steps, Step("output", (before,), ("transform", "words", "bias"), head)]


def _llama(model: Any) -> list[Step]:
    def layer(m: Any, x: Any, turn: Any, index: int) -> Any:
        return getattr(m.layers, str(index))(x, causal(x.shape[1], x), turn=turn)

    def turn(m: Any, x: Any) -> Any:
        return m.cos[: x.shape[1]].to(x.dtype), m.sin[: x.shape[1]].to(x.dtype)

    steps = [_called("e", ("input:input_ids",), "embed_tokens"), Step("turn", ("e",), ("cos", "sin"), turn)]
    before = "e"
    for i in range(len(model.layers)):
        steps.append(Step(f"l{i}", (before, "turn"), (f"layers.{i}",), lambda m, x, t, i=i: layer(m, x, t, i)))
        before = f"l{i}"
    return [*steps, Step("output", (before,), ("norm", "lm_head"), lambda m, x: m.lm_head(m.norm(x)))]


def _t5(model: Any) -> list[Step]:
    def padded(m: Any, mask: Any) -> Any:
        return (1.0 - mask[:, None, None, :].to(m.shared.weight.dtype)) * -1e4

    def mask(m: Any, padded: Any, tokens: Any) -> Any:
        return padded + m.encoder_bias(tokens.shape[1], tokens.device)

    def begin(m: Any, tokens: Any) -> Any:
        x = m.shared(tokens)
        return x, causal(x.shape[1], x) + m.decoder_bias(x.shape[1], x.device)

    depth = len(model.encoder)
    steps = [
        Step("padded", ("input:attention_mask",), ("shared",), padded),
        Step("mask", ("padded", "input:input_ids"), ("encoder_bias",), mask),
        _called("e", ("input:input_ids",), "shared"),
    ]
    before = "e"
    for i in range(depth):
        steps.append(_called(f"e{i}", (before, "mask"), f"encoder.{i}"))
        before = f"e{i}"
    steps.append(_called("memory", (before,), "encoder_norm"))
    steps.append(Step("d", ("input:decoder_input_ids",), ("shared", "decoder_bias"), begin))
    before = "d"
    for i in range(depth):
        steps.append(
            Step(
                f"d{i}",
                (before, "memory", "padded"),
                (f"decoder.{i}",),
                lambda m, x, memory, padded, i=i: (getattr(m.decoder, str(i))(x[0], memory, x[1], padded), x[1]),
            )
        )
        before = f"d{i}"
    head = lambda m, x: F.linear(m.decoder_norm(x[0]), m.shared.weight)  # noqa: E731
    return [*steps, Step("output", (before,), ("decoder_norm", "shared"), head)]


def _experts(model: Any) -> list[Step]:
    def layer(m: Any, x: Any, total: Any, index: int) -> Any:
        x = x + getattr(m.attention, str(index))(x, mask=causal(x.shape[1], x))
        found, balance = getattr(m.experts, str(index))(x)
        return x + found, total + balance

    steps = [Step("e", ("input:input_ids",), ("embed",), lambda m, tokens: (x := m.embed(tokens), x.new_zeros(())))]
    before = "e"
    for i in range(len(model.experts)):
        uses = (f"attention.{i}", f"experts.{i}")
        steps.append(Step(f"l{i}", (before,), uses, lambda m, pair, i=i: layer(m, pair[0], pair[1], i)))
        before = f"l{i}"
    return [*steps, Step("output", (before,), ("head",), lambda m, pair: (m.head(pair[0]), pair[1]))]


def _custom(model: Any) -> list[Step]:
    from tests.pipeline.architectures import Bend

    def layer(m: Any, x: Any, index: int) -> Any:
        x = Bend.apply(getattr(m.layers, str(index))(x), 0.5 + index)
        x = x * 1.5
        left, right = x[:, : x.shape[1] // 2], x[:, x.shape[1] // 2 :]
        x[:, 0] += 1.0
        x.relu_()
        return torch.cat([right, left.tanh()], dim=-1)

    steps = [_called("i", ("input:x",), "inside")]
    before = "i"
    for i in range(len(model.layers)):
        steps.append(Step(f"l{i}", (before,), (f"layers.{i}",), lambda m, x, i=i: layer(m, x, i)))
        before = f"l{i}"
    return [*steps, _called("output", (before,), "outside")]


def _pair(model: Any) -> list[Step]:
    both = lambda m, left, right, scale: {"out": m.both(left * scale + right), "inner": (left, [right])}  # noqa: E731
    return [
        Step("left", ("input:pair",), ("left",), lambda m, pair: m.left(pair["left"]).tanh()),
        Step("right", ("input:pair",), ("right",), lambda m, pair: m.right(pair["right"]).tanh()),
        Step("output", ("left", "right", "input:scale"), ("both",), both),
    ]


RECIPES: dict[str, Callable[[Any], list[Step]]] = {
    "mlp": _mlp,
    "resnet": _resnet,
    "unet": _unet,
    "gpt": _gpt,
    "bert": _bert,
    "llama": _llama,
    "t5": _t5,
    "experts": _experts,
    "custom": _custom,
    "pair": _pair,
}
