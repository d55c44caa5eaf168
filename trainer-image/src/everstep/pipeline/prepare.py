"""Make from a model a plan that all ranks share: what there is to cut, what it costs on these devices, what is best."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from everstep.pipeline.advise import advise
from everstep.pipeline.engine.nested import map_tensors, tensors_of
from everstep.pipeline.engine.stage import OUTPUT, RunnableStage, why_not_split
from everstep.pipeline.errors import PipelineError
from everstep.pipeline.frontend.alike import group_alike_nodes
from everstep.pipeline.frontend.autocast import casting_to
from everstep.pipeline.frontend.kept_tables import KeptTables
from everstep.pipeline.frontend.placement import complete_placement
from everstep.pipeline.frontend.record import Untraceable
from everstep.pipeline.frontend.split import node_modules
from everstep.pipeline.frontend.stages import StageModule as Part
from everstep.pipeline.frontend.trace import Traced, attributes_kept, trace_model
from everstep.pipeline.frontend.tree import Tree, build_tree
from everstep.pipeline.graph import Device, Graph, Link, Profile, find_worst_link, stage_graph
from everstep.pipeline.options import Costs
from everstep.pipeline.plan import Plan, fingerprint_parameters
from everstep.pipeline.planning import AUTO, Wish, fit_devices, scale_graph, solve_again, solve_plan
from everstep.pipeline.profile import WithLoss, measure_graph
from everstep.pipeline.profile_counted import count_costs
from everstep.pipeline.profile_links import combine_on_all_ranks, measure_links
from everstep.pipeline.schedules import ALIASES, NAMES, ActionKind, Schedule, dump_schedule, make_schedule
from everstep.pipeline.transport.control import Control
from everstep.pipeline.transport.grid import Grid

_log = logging.getLogger("everstep.pipeline")

_REPEATS, _WARMUP, _SECONDS = 5, 2, 2.0
_TARGETS = "targets:"  # beside the arguments, of which none has such a name
_MESSAGE = 1 << 16, 8 << 20  # bytes: links are measured with messages as large as the values, within these


@dataclass(frozen=True)
class ProcessPosition:
    """The position of this process in the grid; `nccl` tells whether tensors go by NCCL."""

    grid: Grid
    control: Control
    device: torch.device
    nccl: bool = False


@dataclass(frozen=True)
class ProfileRequest:
    """The way in which nodes are measured.

    Attributes:
        costs: Measured on the devices, or counted.
        autocast: The type to which steps cast.
        loss: A scalar of an output and targets, which is measured too if there are `targets`.
        targets: Those of the example.
        unsplit_inputs: Arguments without samples.
    """

    costs: Costs = "measured"
    autocast: torch.dtype | None = None
    loss: Callable[[Any, Any], Any] | None = None
    targets: Any = None
    unsplit_inputs: Collection[str] = ()


_MEASURED = ProfileRequest()


def look_into(
    model: nn.Module,
    example: Mapping[str, Any],
    blocks: Sequence[str | nn.Module] | None,
    unsplit_inputs: Collection[str] = (),
    *,
    autocast: torch.dtype | None = None,
) -> Traced | Tree:
    """Return what can be cut: the traced model, or the chain of `blocks`.

    Args:
        model: The model to cut.
        example: An example batch, by argument names.
        blocks: The blocks of a chain, by name or as modules; None to trace the model.
        unsplit_inputs: The arguments without samples.
        autocast: The type to which steps cast.

    Raises:
        PipelineError: The model can neither be traced nor is it a chain of blocks; it has the reasons.
    """
    if blocks is not None:
        return build_tree(model, blocks)
    try:
        return trace_model(model, example, unsplit_inputs, autocast=autocast)
    except Untraceable as reason:
        try:
            found = build_tree(model, reason=str(reason))
        except PipelineError as error:
            raise PipelineError(f"{reason}; and it is no chain of blocks either: {error}") from reason
        _log.warning("the model is cut between its blocks only: %s", reason)
        return found


def make_plan(
    model: nn.Module,
    found: Traced | Tree,
    example: Mapping[str, Any],
    wish: Wish,
    place: ProcessPosition,
    request: ProfileRequest = _MEASURED,
    *,
    stage_of: Mapping[str, int] | None = None,
    path: Path | None = None,
    aim: bool = True,
) -> Plan:
    """The same on all ranks; collective. `path`, of the first process, holds the plan between runs: what is there is
    taken if it is for this model, solved again if it is for other ranks, stages or frozen parameters, and written if it
    is new.

    `stage_of`: by hand, whatever the partition would say. `aim`: the plan that is there must be made for the wish's
    objective; who asked for none, or for this very file, takes it whatever it was made for. PipelineError on all ranks.
    """
    mark = fingerprint_parameters((name, tuple(each.shape), str(each.dtype)) for name, each in model.named_parameters())
    first = place.control.run_on_first_rank
    if first(lambda: "there" if path is not None and path.exists() else ""):
        return Plan.from_json(first(lambda: _reuse_or_solve(path, wish, mark, found, stage_of, aim).to_json()))
    nodes: Mapping[str, RunnableStage] = node_modules(found) if isinstance(found, Traced) else found.node_modules()
    batch = make_example_microbatch({**example, _TARGETS: request.targets}, wish, request.unsplit_inputs)
    part, loss = batch.pop(_TARGETS), request.loss
    if loss is not None and request.targets is not None:
        where = torch.device("cpu") if request.costs == "counted" else place.device  # where the nodes' values will be
        own = map_tensors(part, lambda tensor: tensor.to(where))

        def copied() -> Any:  # for each call: a loss may change in place what it is given, and this is the script's
            return map_tensors(own, lambda tensor: tensor.clone())

        nodes = {
            name: WithLoss(node, lambda output: loss(output, copied())) if OUTPUT in node.outputs else node
            for name, node in nodes.items()
        }
    groups = group_alike_nodes(found) if isinstance(found, Traced) else ()
    # What modules keep of such a forward is without data where costs are counted, as a table made for a length.
    with attributes_kept(model), KeptTables(model).kept():
        profile = _make_profile(found.graph, nodes, groups, batch, place, request.costs, request.autocast)

    def solved() -> str:
        made = _solve_and_mark(found, profile, wish, mark, stage_of)
        if path is not None:
            made.save(path)  # before the others hear of it: where it cannot be written, all end alike
        return made.to_json()

    return Plan.from_json(first(solved))


def with_larger_microbatches(wish: Wish, least: int) -> Wish:
    """Return a request of which all micro-batches have as many samples at least.

    Args:
        wish: The request.
        least: The number of samples.

    Raises:
        PipelineError: The request is for more micro-batches.
    """
    if least == 1 or wish.batch is None:
        return wish
    most = max(wish.batch // least, 1)
    several = wish.microbatches or tuple(wish.ranks * factor for factor in (1, 2, 4, 8))
    allowed = tuple(each for each in several if each <= most)
    if wish.microbatches and not allowed:
        raise PipelineError(
            f"microbatches={wish.microbatches[0]} would cut a batch of {wish.batch} samples into micro-batches of one, "
            "which the model or its loss does not take: batch normalisation gets one value of each sample for a "
            "channel and cannot normalise it alone, or squeeze() drops the dimension of the sample, where "
            f"squeeze(-1) would not: take {most} micro-batches at most, or larger batches"
        )
    return replace(wish, microbatches=allowed or (most,))


def make_example_microbatch(
    example: Mapping[str, Any], wish: Wish, unsplit_inputs: Collection[str] = ()
) -> dict[str, Any]:
    """A part of the example that is as large as a micro-batch, or all of it if it is smaller; of what is named in
    `unsplit_inputs`, all."""
    parts = {name: value for name, value in example.items() if name not in unsplit_inputs}
    batch, samples = wish.batch or 1, max((len(each) for each in tensors_of(parts) if each.dim()), default=1)
    count = wish.microbatches[0] if wish.microbatches else min(batch, 2 * wish.ranks)
    own = min(samples, -(-batch // count))

    def rows(tensor: Any) -> Any:
        return tensor[:own] if tensor.dim() and len(tensor) == samples else tensor

    return {name: value if name in unsplit_inputs else map_tensors(value, rows) for name, value in example.items()}


def _make_profile(
    graph: Graph,
    nodes: Mapping[str, RunnableStage],
    groups: Sequence[Sequence[str]],
    batch: Mapping[str, Any],
    place: ProcessPosition,
    costs: Costs,
    autocast: torch.dtype | None,
) -> Profile:
    if costs == "counted":
        with casting_to(autocast, "cpu"):
            return Profile.from_json(
                place.control.run_on_first_rank(lambda: count_costs(graph, nodes, batch).to_json())
            )
    with casting_to(autocast, place.device.type):
        own = measure_graph(
            graph,
            nodes,
            batch,
            device=place.device,
            groups=groups,
            repeats=_REPEATS,
            warmup=_WARMUP,
            seconds=_SECONDS,
            agree=place.control.any,
        )
    largest = max((node.output for node in own.graph.nodes), default=0)
    size = min(max(largest, _MESSAGE[0]), _MESSAGE[1])
    group, device = (None, place.device) if place.nccl else (place.control.group, "cpu")
    with place.control.naming_errors():
        links = measure_links(group, device=device, large=size)
        return of_one_pipeline(combine_on_all_ranks(own, links, place.control.group), place.grid)


def require_file(path: Path | None) -> str:
    """PipelineError if the file of a plan that is to be read is not there; nothing is told."""
    if path is None or not path.is_file():
        raise PipelineError(
            f"the plan file {path or '(no path)'} does not exist: write it with `everstep pipeline plan`"
        )
    return ""


def with_full_backwards(made: Plan, parts: Sequence[Part]) -> Plan:
    """Return the plan with a full backward for stages that cannot split theirs."""
    whole = {part.index: why for part in parts if (why := why_not_split(part)) is not None}
    asked = {a.stage for actions in made.actions.ranks for a in actions if a.kind is ActionKind.INPUT_GRAD}
    if not asked & whole.keys():
        return made
    if "\n" in made.schedule:
        stage = min(asked & whole.keys())
        raise PipelineError(f"the schedule splits the backward of stage {stage}, which cannot be split: {whole[stage]}")
    for stage in sorted(asked & whole.keys()):
        _log.info("stage %d has full backward: %s", stage, whole[stage])
    made = replace(made, split=tuple(sorted(set(range(len(parts))) - whole.keys())))
    return replace(made, prediction=made.predict())


def of_one_pipeline(profile: Profile, grid: Grid) -> Profile:
    """A profile of all processes as one of the ranks of a pipeline: each as slow and as small as the worst replica."""

    def device(rank: int) -> Device:
        alike = [profile.devices[pipeline[rank]] for pipeline in grid.processes]
        limits = [each.memory for each in alike if each.memory is not None]
        return Device(min(each.speed for each in alike), min(limits) if limits else None)

    def link(one: int, other: int) -> Link:
        alike = [profile.links[pipeline[one]][pipeline[other]] for pipeline in grid.processes]
        return find_worst_link(alike)

    ranks = range(grid.ranks)
    links = tuple(tuple(Link() if one == other else link(one, other) for other in ranks) for one in ranks)
    return replace(profile, devices=tuple(map(device, ranks)), links=links)


def _reuse_or_solve(
    path: Path | None, wish: Wish, mark: str, found: Traced | Tree, stage_of: Mapping[str, int] | None, aim: bool
) -> Plan:
    """The plan of the file, or what is solved and kept there instead."""
    assert path is not None, "it is there"
    try:
        kept = Plan.load(path)
        kept.check_model(mark, [node.name for node in found.graph.nodes])
    except PipelineError as error:
        where = "" if str(path) in str(error) else f"{path}: "
        raise PipelineError(f"{where}{error}; delete the file to plan again") from error
    placed, today = _complete_manual_placement(found, stage_of), kept.profile.graph.freeze_as(found.graph)
    same = (
        today == kept.profile.graph
        and len(kept.actions.ranks) == wish.ranks
        and wish.stages in (None, len(kept.placement))
        and wish.schedule in (AUTO, kept.schedule)
        and (not wish.microbatches or kept.microbatches in wish.microbatches)
        and wish.batch is not None
        and -(-wish.batch // kept.microbatches) == kept.profile.samples
        and placed in (None, kept.stage_of)
        and _fits_memory(kept, wish)
        and not (
            aim
            and placed is None
            and (kept.objective, kept.optimizer_factor) != (wish.objective, wish.optimizer_factor)
        )
        and wish.memory_weight in (None, kept.memory_weight)
    )
    if same:
        return kept
    kept = replace(kept, profile=replace(kept.profile, graph=today))
    made = solve_again(kept, wish) if placed is None else _by_hand(kept.profile, wish, placed, mark)
    made.save(path)
    return made


def _fits_memory(kept: Plan, wish: Wish) -> bool:
    """Tell whether the plan was made for as much memory as there is now; true if the request names no memory."""
    return wish.memory is None or {each.memory for each in kept.devices} == {wish.memory}


def _solve_and_mark(
    found: Traced | Tree, profile: Profile, wish: Wish, mark: str, stage_of: Mapping[str, int] | None
) -> Plan:
    placed = _complete_manual_placement(found, stage_of)
    return solve_plan(profile, wish, model=mark) if placed is None else _by_hand(profile, wish, placed, mark)


def _complete_manual_placement(found: Traced | Tree, stage_of: Mapping[str, int] | None) -> dict[str, int] | None:
    """The stage of each node, if anything was placed by hand."""
    wanted = stage_of if stage_of is not None else found.manual
    return complete_placement(found.graph, wanted) if wanted else None


def _by_hand(profile: Profile, wish: Wish, stage_of: Mapping[str, int], mark: str) -> Plan:
    """The plan for a split that is given; the schedule is the best for it, or that of the wish."""
    stages, batch = max(stage_of.values()) + 1, wish.batch or profile.samples
    if stages % wish.ranks or wish.stages not in (None, stages):
        raise PipelineError(
            f"the model is placed in {stages} stages, and {wish.stages or f'a multiple of {wish.ranks}'} are needed: "
            "change stage_of, or stages"
        )

    profile = fit_devices(profile, wish)

    def fitted(microbatches: int) -> Profile:
        samples = -(-batch // microbatches)
        return replace(profile, graph=scale_graph(profile.graph, samples / profile.samples), samples=samples)

    several = tuple(wish.ranks * factor for factor in (1, 2, 4, 8) if wish.ranks * factor <= batch)
    name, choices, reasons = wish.schedule, wish.microbatches or several or (batch,), tuple[str, ...]()
    if isinstance(name, Schedule):
        text, microbatches, ranks = dump_schedule(name), name.microbatches, name.placement
    else:
        advice = advise(
            lambda _, m: stage_graph(fitted(m).graph.weigh_parameters(wish.optimizer_factor), stage_of),
            wish.ranks,
            choices,
            devices=profile.devices,
            links=profile.links or None,
            chunks=(stages // wish.ranks,),
            schedules=NAMES if name == AUTO else (ALIASES.get(name, name),),
            optimizer_factor=wish.optimizer_factor,
        )
        text, microbatches, reasons = advice.choice.schedule, advice.choice.microbatches, advice.reasons
        ranks = make_schedule(text, stages, wish.ranks, microbatches).placement
    made = Plan(
        fitted(microbatches),
        stage_of,
        ranks,
        text,
        microbatches,
        optimizer_factor=wish.optimizer_factor,
        model=mark,
        reasons=reasons,
    )
    made = replace(made, prediction=made.predict())
    for rank, (needs, device) in enumerate(zip(made.prediction.memory, made.devices, strict=True)):
        if isinstance(name, Schedule) and device.memory is not None and needs > device.memory:
            raise PipelineError(
                f"the model as it is placed does not fit the memory: rank {rank} needs {needs / 1e9:.4g} GB, it has "
                f"{device.memory / 1e9:.4g}: take more ranks, smaller micro-batches, or recompute activations"
            )
    return made
