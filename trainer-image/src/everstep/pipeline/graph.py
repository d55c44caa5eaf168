"""Describe the model and the machines to the planning parts: pure data, to and from JSON.

Times are seconds per micro-batch on a device of speed 1, sizes are bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from math import ceil, inf
from typing import Any, TypeVar

from everstep.pipeline.errors import PipelineError

VERSION = 1
T = TypeVar("T")
_WORD = re.compile(r"[^\s,#]+")  # a name stands in the text of a schedule


@dataclass(frozen=True)
class GraphNode:
    """One unit that is never cut. `inputs`: names of the nodes whose values it uses; () if it reads graph inputs only.

    Seconds per micro-batch: `forward`; `input_grad` and `weight_grad`, the parts of a split backward; `unsplit`, a
    backward at once, which reads but once what both parts need, None if it takes as long as they do.
    Bytes: `activation`, kept for backward per micro-batch; `parameters`, each tensor once and without those in `ties`;
    `output`, its value per micro-batch. Nodes with the same word in `colocate` are one stage. `ties` names the shared
    parameters that it uses. `gradient`: whether its value has a gradient (a mask or a position has none).
    `frozen`: bytes of `parameters` that do not learn; `cast`: of copies of them in a narrower type, one for all
    micro-batches.
    """

    name: str
    inputs: tuple[str, ...] = ()
    forward: float = 0.0
    input_grad: float = 0.0
    weight_grad: float = 0.0
    activation: int = 0
    parameters: int = 0
    output: int = 0
    colocate: str = ""
    ties: tuple[str, ...] = ()
    gradient: bool = True
    unsplit: float | None = None
    frozen: int = 0
    cast: int = 0

    @property
    def backward(self) -> float:
        """Return the seconds of a backward at once, which never takes longer than its parts."""
        return _at_once(self)


@dataclass(frozen=True)
class Graph:
    """`nodes` in a topological order; `shared`: the bytes of each parameter that several nodes use, by name; `frozen`:
    the names of those among them that do not learn.

    PipelineError if a name comes twice, is no single word or is used before its node, if a shared parameter has no
    size, if a number is negative, if more is frozen than there is.
    """

    nodes: tuple[GraphNode, ...]
    shared: tuple[tuple[str, int], ...] = ()
    frozen: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        known: set[str] = set()
        shared = dict(self.shared)
        for node in self.nodes:
            if not _WORD.fullmatch(node.name):
                raise PipelineError(f"node {node.name!r}: a name is one word without white space, commas and #")
            if node.name in known:
                raise PipelineError(f"node {node.name!r} is there twice")
            for name in node.inputs:
                if name not in known:
                    raise PipelineError(f"node {node.name!r} uses {name!r}, which is no node before it")
            for name in node.ties:
                if name not in shared:
                    raise PipelineError(
                        f"node {node.name!r} uses the shared parameter {name!r}: give its bytes in shared"
                    )
            _no_negatives(f"node {node.name!r}", node)
            if node.frozen > node.parameters:
                raise PipelineError(
                    f"node {node.name!r}: {node.frozen} bytes are frozen, but its parameters are {node.parameters}"
                )
            known.add(node.name)
        if unknown := [name for name in self.frozen if name not in shared]:
            raise PipelineError(
                f"frozen: {unknown[0]!r} is no shared parameter; there are {', '.join(map(repr, shared)) or 'none'}"
            )

    @cached_property
    def by_name(self) -> Mapping[str, GraphNode]:
        return {node.name: node for node in self.nodes}

    def weigh_parameters(self, optimizer_factor: float) -> Graph:
        """Return the graph in which each byte of `parameters` and `shared` stands for 1 + `optimizer_factor` bytes.

        A frozen parameter, and a copy in a narrower type, have neither a gradient nor an optimizer's state: they count
        as a smaller parameter that has both. Who plans by this graph needs to know of nothing but parameters.
        """

        def weighed(size: int, frozen: int, cast: int = 0) -> int:
            return size - frozen + ceil((frozen + cast) / (1 + optimizer_factor))

        return replace(
            self,
            nodes=tuple(
                replace(node, parameters=weighed(node.parameters, node.frozen, node.cast), frozen=0, cast=0)
                if node.frozen or node.cast
                else node
                for node in self.nodes
            ),
            shared=tuple((name, weighed(size, size if name in self.frozen else 0)) for name, size in self.shared),
            frozen=(),
        )

    def freeze_as(self, other: Graph) -> Graph:
        """Return this graph with those parameters frozen that are in `other`, and gradients where that has them.

        `other` is a graph of the same model. What was measured stays as it is.
        """
        now = other.by_name
        return replace(
            self,
            nodes=tuple(
                replace(node, frozen=now[node.name].frozen, gradient=now[node.name].gradient) for node in self.nodes
            ),
            frozen=other.frozen,
        )

    def to_json(self) -> str:
        return _dump_text("graph", self)

    @classmethod
    def from_json(cls, text: str | bytes) -> Graph:
        """PipelineError if the text is no graph of a known version."""
        return _load_text("graph", cls, text)


@dataclass(frozen=True)
class Device:
    """`speed` is relative: a time divided by it is that on this device. `memory` in bytes, None for no limit."""

    speed: float = 1.0
    memory: int | None = None


@dataclass(frozen=True)
class Link:
    """The connection from one rank to another.

    Attributes:
        bandwidth: Bytes per second.
        latency: Seconds until the first byte is there.
        held: The share of the time that the bytes take in which neither end computes: 0 where messages are wholly
            overlapped, 1 where a processor that computes has to copy them.
    """

    bandwidth: float = inf
    latency: float = 0.0
    held: float = 0.0

    def seconds(self, size: int) -> float:
        return self.latency + size / self.bandwidth


Links = Sequence[Sequence[Link]]  # links[i][j]: from rank i to rank j; links[i][i] is not used


def make_uniform_links(ranks: int, link: Link) -> tuple[tuple[Link, ...], ...]:
    """The same link between all ranks."""
    return ((link,) * ranks,) * ranks


def find_worst_link(links: Sequence[Link]) -> Link:
    """A link that is nowhere better than any of these."""
    return Link(
        min((link.bandwidth for link in links), default=inf),
        max((link.latency for link in links), default=0.0),
        max((link.held for link in links), default=0.0),
    )


@dataclass(frozen=True)
class Profile:
    """The result of a measurement: a graph, and what it runs on.

    Attributes:
        graph: The graph with its measured costs.
        devices: The devices of the ranks.
        links: The links of all pairs of ranks, as in `Links`.
        samples: The number of samples of each micro-batch.
        spread: For each node, the half width of the middle half of its times over the median.
        device: The device that was measured.
    """

    graph: Graph
    devices: tuple[Device, ...] = ()
    links: tuple[tuple[Link, ...], ...] = ()
    samples: int = 1
    spread: Mapping[str, float] = field(default_factory=dict)
    device: str = ""

    def to_json(self) -> str:
        return _dump_text("profile", self)

    @classmethod
    def from_json(cls, text: str | bytes) -> Profile:
        """PipelineError if the text is no profile of a known version."""
        return _load_text("profile", cls, text)


@dataclass(frozen=True)
class Edge:
    """A value that leaves its stage: `size` bytes per micro-batch, to `targets` (ascending, all above `source`)."""

    value: str
    source: int
    targets: tuple[int, ...]
    size: int = 0
    gradient: bool = True


@dataclass(frozen=True)
class Stage:
    """The sums over its nodes; a parameter that several of them share counts once."""

    forward: float = 1.0
    input_grad: float = 1.0
    weight_grad: float = 1.0
    activation: int = 1
    parameters: int = 0
    unsplit: float | None = None

    @property
    def backward(self) -> float:
        """Return the seconds of a backward at once, which never takes longer than its parts."""
        return _at_once(self)

    @property
    def work(self) -> float:
        return self.forward + self.backward


@dataclass(frozen=True)
class StageGraph:
    """Stages and what flows between them. `ties`: a shared parameter and the stages that own it, ascending.

    PipelineError if an edge does not flow upwards, a value comes twice, a stage is not there, a number is negative.
    """

    stages: tuple[Stage, ...]
    edges: tuple[Edge, ...] = ()
    ties: tuple[tuple[str, tuple[int, ...]], ...] = ()

    def __post_init__(self) -> None:
        for index, stage in enumerate(self.stages):
            _no_negatives(f"stage {index}", stage)
        values: set[str] = set()
        for edge in self.edges:
            where = f"value {edge.value!r} of stage {edge.source}"
            if edge.value in values or not _WORD.fullmatch(edge.value):
                raise PipelineError(f"{where}: its name must be one word, and of one edge")
            values.add(edge.value)
            if not edge.targets or list(edge.targets) != sorted(set(edge.targets)):
                raise PipelineError(f"{where}: its targets must be ascending, at least one")
            if not 0 <= edge.source < edge.targets[0] or edge.targets[-1] >= len(self.stages):
                raise PipelineError(f"{where} goes to {edge.targets}: values flow to higher stages that are there")
            _no_negatives(where, edge)
        for name, owners in self.ties:
            if (
                len(owners) < 2
                or list(owners) != sorted(set(owners))
                or not 0 <= owners[0] <= owners[-1] < len(self.stages)
            ):
                raise PipelineError(f"shared parameter {name!r}: owners {owners} are not two or more stages, ascending")

    def to_json(self) -> str:
        return _dump_text("stages", self)

    @classmethod
    def from_json(cls, text: str | bytes) -> StageGraph:
        """PipelineError if the text is no stage graph of a known version."""
        return _load_text("stages", cls, text)


def make_chain_graph(stages: Sequence[Stage], size: int = 0) -> StageGraph:
    """Each stage gives one value, of `size` bytes, to the next."""
    edges = tuple(Edge(f"v{index}", index, (index + 1,), size) for index in range(len(stages) - 1))
    return StageGraph(tuple(stages), edges)


def stage_graph(graph: Graph, stage_of: Mapping[str, int]) -> StageGraph:
    """Return the graph of stages that `graph` becomes once each node is in its stage.

    The backward of a stage that gets no value with a gradient is all in its weight gradient.

    Args:
        graph: The graph of nodes.
        stage_of: The stage of each node, from 0 to the highest.

    Raises:
        PipelineError: A node has no stage, a stage has no node, a value would flow downwards, or colocated nodes are
            apart.
    """
    stages, words = len(set(stage_of.values())), dict[str, tuple[str, int]]()
    totals = [
        dict.fromkeys(("forward", "input_grad", "weight_grad", "backward", "activation", "parameters"), 0.0)
        for _ in range(stages)
    ]
    owners: dict[str, set[int]] = {}
    users: dict[str, set[int]] = {}
    for node in graph.nodes:
        if node.name not in stage_of:
            raise PipelineError(f"node {node.name!r} is in no stage")
        stage = stage_of[node.name]
        if not 0 <= stage < stages:
            raise PipelineError(
                f"node {node.name!r} is in stage {stage}, but there are {stages}: number them from 0 without gaps"
            )
        for name in node.inputs:
            if stage_of[name] > stage:
                raise PipelineError(
                    f"{name!r} of stage {stage_of[name]} would flow down to {node.name!r} of stage {stage}"
                )
            if stage_of[name] < stage:
                users.setdefault(name, set()).add(stage)
        if node.colocate:
            other, at = words.setdefault(node.colocate, (node.name, stage))
            if at != stage:
                raise PipelineError(
                    f"{other!r} (stage {at}) and {node.name!r} (stage {stage}) must be one stage: {node.colocate}"
                )
        for name in node.ties:
            owners.setdefault(name, set()).add(stage)
        for key in totals[stage]:
            totals[stage][key] += getattr(node, key)
    for name, size in graph.shared:
        for stage in owners.get(name, ()):
            totals[stage]["parameters"] += size
    learning = {stage for node in graph.nodes if node.gradient for stage in users.get(node.name, ())}
    for stage, total in enumerate(totals):
        if stage not in learning:  # nobody waits for the gradient of a batch: all is done with that of the weights
            total["weight_grad"], total["input_grad"] = total["backward"], 0.0
    split = any(node.unsplit is not None for node in graph.nodes)
    return StageGraph(
        stages=tuple(
            Stage(
                total["forward"],
                total["input_grad"],
                total["weight_grad"],
                int(total["activation"]),
                int(total["parameters"]),
                total["backward"] if split else None,
            )
            for total in totals
        ),
        edges=tuple(
            Edge(node.name, stage_of[node.name], tuple(sorted(users[node.name])), node.output, node.gradient)
            for node in graph.nodes
            if node.name in users
        ),
        ties=tuple((name, tuple(sorted(stages_))) for name, stages_ in sorted(owners.items()) if len(stages_) > 1),
    )


def _at_once(item: GraphNode | Stage) -> float:
    both = item.input_grad + item.weight_grad
    return both if item.unsplit is None else min(both, item.unsplit)


def _no_negatives(where: str, item: Any) -> None:
    for key, number in vars(item).items():
        if isinstance(number, int | float) and not (isinstance(number, bool) or 0 <= number < inf):
            raise PipelineError(f"{where}: {key} is {number}")


def _dump_text(kind: str, item: Any) -> str:
    def plain(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        return {key: "inf" if value == inf else value for key, value in pairs}  # JSON has no word for infinity

    return json.dumps({"everstep": kind, "version": VERSION, **asdict(item, dict_factory=plain)})


def _load_text(kind: str, cls: type[T], text: str | bytes) -> T:
    from pydantic import TypeAdapter, ValidationError

    try:
        data = json.loads(text)
    except ValueError as error:
        raise PipelineError(f"not JSON: {error}") from error
    if not isinstance(data, dict) or data.pop("everstep", None) != kind:
        raise PipelineError(f"not a {kind} of everstep")
    if (version := data.pop("version", None)) != VERSION:
        raise PipelineError(f"a {kind} of version {version}, this everstep reads {VERSION} only: create it again")
    try:
        return TypeAdapter(cls).validate_python(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise PipelineError(f"{kind}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
