"""The plan of a pipeline: which node is in which stage on which rank, in which order, and what that should cost.

A file of JSON that is whole in itself: it can be shown, simulated with other numbers, and solved again for other
stages. Solving needs numpy, reading does not.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path

from everstep.pipeline.errors import PipelineError
from everstep.pipeline.graph import Device, Graph, Link, Links, Profile, StageGraph, make_uniform_links, stage_graph
from everstep.pipeline.schedules import (
    Result,
    Schedule,
    dump_schedule,
    lower_schedule,
    make_schedule,
    parse_schedule,
    simulate_schedule,
    validate_schedule,
)

VERSION = 2
OPTIMIZER_FACTOR = 3.0  # bytes of a gradient and of Adam's two moments for each byte of parameters


@dataclass(frozen=True)
class Prediction:
    """The prediction of one step.

    Attributes:
        seconds: The time of the step.
        bubble: The time by which the step is longer than the work of the busiest rank, relative to that work.
        memory: The bytes of each rank.
        bound: What the objective, as simulated, is at least for every split into so many stages; None where the split
            was given by hand.
        gap: How far this plan is above `bound`; None where the split was given by hand.
    """

    seconds: float = 0.0
    bubble: float = 0.0
    memory: tuple[int, ...] = ()
    bound: float | None = None
    gap: float | None = None


@dataclass(frozen=True)
class Plan:
    """A plan of a pipeline. PipelineError if the parts do not fit each other.

    Attributes:
        profile: The profile that the plan was made with.
        stage_of: The stage of each node.
        placement: The rank of each stage.
        schedule: The name of the schedule, or its text if it has none.
        split: The stages that may split their backward; None for all.
        samples: The number of samples in a micro-batch.
        optimizer_factor: The bytes of gradients and optimizer for each byte of parameters, as in `partition_graph`.
        model: The fingerprint of the parameters; "" if it is not known.
    """

    profile: Profile
    stage_of: Mapping[str, int]
    placement: tuple[int, ...]
    schedule: str
    microbatches: int
    prediction: Prediction = Prediction()
    split: tuple[int, ...] | None = None
    objective: str = "speed"
    memory_weight: float = 0.0
    optimizer_factor: float = OPTIMIZER_FACTOR
    model: str = ""
    reasons: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        unknown = [name for name in self.stage_of if name not in self.profile.graph.by_name]
        if unknown:
            raise PipelineError(f"stage_of: {unknown[0]!r} is no node of the graph")
        if len(self.placement) != len(self.stages.stages):
            raise PipelineError(f"placement: {len(self.placement)} stages, but stage_of has {len(self.stages.stages)}")
        if self.actions.placement != self.placement:
            raise PipelineError(
                f"placement: {self.placement}, but schedule {self.schedule_name} has {self.actions.placement}"
            )
        ranks = len(self.actions.ranks)
        for field, found in (("devices", self.profile.devices), ("links", self.profile.links)):
            if found and len(found) != ranks:
                raise PipelineError(f"profile.{field}: there are {len(found)} for {ranks} ranks")

    @cached_property
    def stages(self) -> StageGraph:
        return stage_graph(self.profile.graph, self.stage_of)

    @cached_property
    def actions(self) -> Schedule:
        """The computations of each rank."""
        if "\n" in self.schedule:
            return parse_schedule(self.schedule)
        stages, ranks = len(self.placement), max(self.placement, default=-1) + 1
        return make_schedule(self.schedule, stages, ranks, self.microbatches, self.split)

    @property
    def schedule_name(self) -> str:
        return self.actions.name

    def prove(self) -> Schedule:
        """Return what each rank does, with what is sent, reduced and tied; raise PipelineError if it cannot be
        proven."""
        lowered = self.actions if self.actions.lowered else lower_schedule(self.actions, self.stages)
        if (wrong := validate_schedule(lowered, self.stages)) is not None:
            raise PipelineError(f"schedule: {wrong}")
        return lowered

    @property
    def devices(self) -> tuple[Device, ...]:
        return self.profile.devices or (Device(),) * len(self.actions.ranks)

    @property
    def links(self) -> Links | None:
        return self.profile.links or None

    def changed(
        self,
        *,
        microbatches: int | None = None,
        schedule: str | Schedule | None = None,
        speeds: Sequence[float] | None = None,
        link: Link | None = None,
    ) -> Plan:
        """The same split with other numbers, None for those of the plan. PipelineError if they do not fit it."""
        if speeds is not None and len(speeds) != len(self.devices):
            raise PipelineError(f"speeds: {len(speeds)} for {len(self.devices)} ranks")
        devices = self.devices
        if speeds is not None:
            devices = tuple(replace(device, speed=speed) for device, speed in zip(devices, speeds, strict=True))
        links = self.profile.links if link is None else make_uniform_links(len(devices), link)
        if microbatches is not None and schedule is None and "\n" in self.schedule:
            raise PipelineError("microbatches: the plan has actions of its own for its number of them: name a schedule")
        if schedule is None:
            schedule = self.schedule
        if isinstance(schedule, Schedule):
            text, placement, microbatches = dump_schedule(schedule), schedule.placement, schedule.microbatches
        else:
            microbatches = microbatches or self.microbatches
            text, placement = schedule, self.placement
        plan = replace(
            self,
            profile=replace(self.profile, devices=devices, links=links),
            schedule=text,
            placement=placement,
            microbatches=microbatches,
        )
        return replace(plan, prediction=plan.predict())

    def predict(self, bound: float | None = None, gap: float | None = None) -> Prediction:
        """Simulate a step, and return the prediction.

        Args:
            bound: The lower bound on the objective to put into the prediction.
            gap: How far the plan is above the bound.
        """
        result = self.simulate()
        memory = [kept + waiting for kept, waiting in zip(result.peak, result.waiting, strict=True)]
        weighed = stage_graph(self.profile.graph.weigh_parameters(self.optimizer_factor), self.stage_of)
        for stage, rank in zip(weighed.stages, self.placement, strict=True):
            memory[rank] += round(stage.parameters * (1 + self.optimizer_factor))
        return Prediction(result.makespan, result.bubble_ratio, tuple(memory), bound, gap)

    def simulate(self) -> Result:
        return simulate_schedule(self.actions, self.stages, self.devices, self.links)

    def check_model(self, model: str, nodes: Collection[str] = ()) -> None:
        """PipelineError if the plan is for another model than the one with this fingerprint and these nodes."""
        if self.model and model and self.model != model:
            raise PipelineError(
                f"the plan is for another model ({self.model[:12]}, this one is {model[:12]}): profile and plan again"
            )
        missing = sorted(set(nodes) - set(self.stage_of))
        gone = sorted(set(self.stage_of) - set(nodes)) if nodes else []
        if missing or gone:
            what = f"node {missing[0]!r} has no stage in it" if missing else f"its node {gone[0]!r} is not in the model"
            raise PipelineError(f"the plan is for another model: {what}; profile and plan again")

    def to_json(self) -> str:
        own = {
            each.name: getattr(self, each.name) for each in fields(self) if each.name not in ("profile", "prediction")
        }
        data = {
            "everstep": "plan",
            "version": VERSION,
            **own,
            "prediction": asdict(self.prediction),
            "graph_hash": graph_hash(self.profile.graph),
            "profile": json.loads(self.profile.to_json()),
        }
        return json.dumps(data, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> Plan:
        """PipelineError names the field that is wrong."""
        from pydantic import TypeAdapter, ValidationError

        try:
            data = json.loads(text)
        except ValueError as error:
            raise PipelineError(f"not JSON: {error}") from error
        if not isinstance(data, dict) or data.pop("everstep", None) != "plan":
            raise PipelineError("not a plan of everstep: `everstep pipeline plan` makes one")
        if (version := data.pop("version", None)) != VERSION:
            raise PipelineError(f"version: {version}, this everstep reads {VERSION} only: plan again")
        told = data.pop("graph_hash", None)
        if unknown := sorted(data.keys() - {each.name for each in fields(cls)}):
            raise PipelineError(f"{unknown[0]}: is no field of a plan")
        profile = Profile.from_json(json.dumps(data.pop("profile", None)))
        if told != graph_hash(profile.graph):
            raise PipelineError("graph_hash: the graph was changed after it was planned: plan again")
        try:
            return TypeAdapter(cls).validate_python({**data, "profile": profile})
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise PipelineError(f"{'.'.join(map(str, first['loc'])) or 'plan'}: {first['msg']}") from error

    def save(self, path: Path) -> None:
        """All of it or nothing: whoever dies meanwhile leaves what was there. PipelineError names the file."""
        fresh = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with fresh.open("w") as file:
                file.write(self.to_json())
                file.flush()
                os.fsync(file.fileno())  # else a machine that loses its power may leave an empty file of this name
            fresh.replace(path)
        except OSError as error:
            raise PipelineError(f"the plan cannot be written to {path}: {error.strerror}") from error

    @classmethod
    def load(cls, path: Path) -> Plan:
        """PipelineError names the file and the field."""
        try:
            return cls.from_json(path.read_bytes())
        except PipelineError as error:
            raise PipelineError(f"{path}: {error}") from error


def graph_hash(graph: Graph) -> str:
    """The same for whole numbers however they are written, and without what is newer than plans, if it is not there."""
    plain = []
    for node in graph.nodes:
        known = [value for name, value in vars(node).items() if name not in ("frozen", "cast") or value]
        plain.append([float(each) if isinstance(each, int) else each for each in known])
    frozen = [graph.frozen] if graph.frozen else []
    return hashlib.sha256(json.dumps([plain, graph.shared, *frozen]).encode()).hexdigest()


def fingerprint_parameters(parameters: Iterable[tuple[str, Sequence[int], str]]) -> str:
    """Return a digest of the names, shapes and types of a model's parameters, in any order."""
    lines = sorted(f"{name} {list(shape)} {dtype}" for name, shape, dtype in parameters)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
