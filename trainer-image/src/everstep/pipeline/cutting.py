"""Trace a model, plan its pipeline, and cut it into the stages of the plan: the middle of the making of a pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from everstep.pipeline.behind_results import find_parameters_behind_results
from everstep.pipeline.comparison import compare_stages
from everstep.pipeline.counted_targets import CountedTargets
from everstep.pipeline.engine.losses import Loss, compute_loss
from everstep.pipeline.engine.microbatch import Parts, batch_size
from everstep.pipeline.first_call import call_once, count_least_samples
from everstep.pipeline.frontend.foreign_weights import TrainedElsewhere, make_foreign_error
from everstep.pipeline.frontend.split import split_model
from everstep.pipeline.frontend.stages import StageModule
from everstep.pipeline.frontend.trace import Traced
from everstep.pipeline.frontend.tree import Tree
from everstep.pipeline.frontend.writes import refuse_reads_of_statistics, refuse_writes
from everstep.pipeline.gradient_mode import check_gradient_mode
from everstep.pipeline.half import refuse_half_regions
from everstep.pipeline.left_behind import LossUses, WatchedLoss, check_left_behind, check_second_forward
from everstep.pipeline.loss_graph import check_loss_graph
from everstep.pipeline.loss_state import loss_kept, refuse_state
from everstep.pipeline.meeting_samples import FirstLook, check_samples, has_samples
from everstep.pipeline.negotiation import PipelineTerms
from everstep.pipeline.plan import Plan
from everstep.pipeline.prepare import (
    ProfileRequest,
    look_into,
    make_example_microbatch,
    make_plan,
    with_full_backwards,
    with_larger_microbatches,
)
from everstep.pipeline.schedules import Schedule
from everstep.pipeline.unsupported import refuse_frequencies

_TARGETS = "targets:"  # beside the arguments, of which none has such a name


@dataclass(frozen=True)
class CutModel:
    """A model that is cut into stages, which are checked, and the order in which they work, which is proven.

    Attributes:
        found: The traced model, or the chain of its blocks.
        plan: The plan, the same on all processes.
        stages: All stages, as modules without anything of their own.
        schedule: The actions of each rank.
        loss: The loss, which looks at the first micro-batch where it could not be checked before.
        idle: The names of the parameters that the loss does not depend on, as far as that is known.
        behind: Of parameters that are behind some results of the model only, the numbers of these results.
        least: How many samples a micro-batch has to have.
    """

    found: Traced | Tree
    plan: Plan
    stages: Sequence[StageModule]
    schedule: Schedule
    loss: Loss
    idle: Sequence[str] = ()
    behind: Mapping[str, Sequence[int]] = field(default_factory=dict)
    least: int = 1


def trace_requested_model(terms: PipelineTerms) -> Traced | Tree:
    """Find what of the model can be in a stage of its own. Collective.

    Args:
        terms: The terms on which all processes agree.

    Returns:
        The traced model, or the chain of its blocks.

    Raises:
        PipelineError: On all processes: the model cannot be cut.
    """
    return terms.control.run_on_all_ranks(lambda: _look_into_model(terms))


def plan_and_cut(terms: PipelineTerms, found: Traced | Tree) -> CutModel:
    """Plan the stages, cut the model into them, and check that they are the model. Collective.

    Args:
        terms: The terms on which all processes agree.
        found: The traced model, or the chain of its blocks.

    Returns:
        The model in stages, the same on all processes.

    Raises:
        PipelineError: On all processes: nothing fits, or the stages would train something else.
    """
    least = terms.control.run_on_first_rank(lambda: _count_least_samples(terms))
    wish = terms.control.run_on_all_ranks(lambda: with_larger_microbatches(terms.wish, least))
    terms = replace(terms, wish=wish)
    _refuse_writes(terms, found, terms.request.microbatches or 1)  # before anything is measured, if that is known
    with loss_kept(terms.request.loss):
        loss, uses = _watch_loss(terms, found)  # before anything else calls it
        plan = _make_plan(terms, found)
        _refuse_writes(terms, found, plan.microbatches)
        plan, stages, schedule = terms.control.run_on_all_ranks(lambda: _cut_model(found, plan))
        times = plan.microbatches * terms.position.grid.replicas
        terms.control.run_on_all_ranks(lambda: _refuse_uses(found, uses, plan, stages, times))
        loss, idle = _check_cut(terms, found, plan, stages, loss, least)
        behind = terms.control.run_on_first_rank(lambda: _find_behind(terms, found))
        idle = [name for name in idle if name not in behind]
        return CutModel(found, plan, stages, schedule, loss, idle, behind, least)


def _find_behind(terms: PipelineTerms, found: Traced | Tree) -> Mapping[str, Sequence[int]]:
    request = terms.request
    if not request.plan.check:
        return {}
    unsplit_inputs = request.engine.unsplit_inputs
    return find_parameters_behind_results(request.model, found, terms.example, unsplit_inputs, terms.autocast)


def _look_into_model(terms: PipelineTerms) -> Traced | Tree:
    request = terms.request
    if request.plan.check:
        call_once(request.model, terms.example, request.engine.unsplit_inputs, terms.autocast)
    found = look_into(
        request.model, terms.example, request.plan.blocks, request.engine.unsplit_inputs, autocast=terms.autocast
    )
    if isinstance(found, Traced):
        refuse_half_regions(found.record, request.engine.precision)
    return found


def _count_least_samples(terms: PipelineTerms) -> int:
    request = terms.request
    if not request.plan.check:
        return 1
    unsplit_inputs, loss, targets = request.engine.unsplit_inputs, request.loss, request.targets
    return count_least_samples(request.model, terms.example, unsplit_inputs, terms.autocast, loss, targets)


def _refuse_writes(terms: PipelineTerms, found: Traced | Tree, microbatches: int) -> None:
    """Refuse a forward that writes weights or buffers, if it is called for several parts of a batch; and one that reads
    statistics which are put together when a step ends."""
    number = microbatches * terms.position.grid.replicas
    if not terms.request.plan.check or not isinstance(found, Traced):
        return
    record = found.record
    terms.control.run_on_all_ranks(lambda: refuse_reads_of_statistics(record))
    if number > 1:
        terms.control.run_on_all_ranks(lambda: refuse_frequencies(found.model))
        terms.control.run_on_all_ranks(lambda: refuse_writes(record, number))


def _make_plan(terms: PipelineTerms, found: Traced | Tree) -> Plan:
    request, options = terms.request, terms.request.plan

    def sum_of_loss(output: Any, targets: Any) -> Any:
        return compute_loss(
            request.loss, output, targets, batch_size(targets, are_targets=True) or 1, request.engine.loss_weight
        ).sum

    return make_plan(
        request.model,
        found,
        terms.example,
        terms.wish,
        terms.position,
        ProfileRequest(options.costs, terms.autocast, sum_of_loss, request.targets, request.engine.unsplit_inputs),
        stage_of=options.stage_of,
        path=terms.plan_file,
        aim=options.optimize is not None and options.source == "profile",
    )


def _cut_model(found: Traced | Tree, plan: Plan) -> tuple[Plan, Sequence[StageModule], Schedule]:
    stages = split_model(found, plan.stage_of)
    fitted = with_full_backwards(plan, stages)
    return fitted, stages, fitted.prove()


def _watch_loss(terms: PipelineTerms, found: Traced | Tree) -> tuple[Loss, LossUses]:
    """Refuse a loss that reads what a forward leaves behind.

    Return the one that looks at its first call for that, and what it is known to use.
    """
    request = terms.request
    loss, weight, unsplit_inputs = request.loss, request.engine.loss_weight, request.engine.unsplit_inputs
    if not request.plan.check:
        return loss, LossUses()
    left = found.left if isinstance(found, Traced) else ()
    uses = LossUses()
    if request.targets is not None:
        model, inputs, targets, first = request.model, terms.example, request.targets, terms.control.run_on_first_rank
        uses = first(lambda: check_left_behind(model, left, inputs, targets, loss, weight, unsplit_inputs))
        first(lambda: check_loss_graph(model, inputs, targets, loss, weight, unsplit_inputs))
    return WatchedLoss(loss, request.model, left), uses


def _refuse_uses(found: Traced | Tree, uses: LossUses, plan: Plan, stages: Sequence[StageModule], times: int) -> None:
    """Refuse a loss that reads what changes in training and what the rank of the last stage, where it runs, lacks; and
    one that goes on from call to call, if a batch has several."""
    if times > 1 and uses.values is not None:
        refuse_state(*uses.values, times)
    changes = {name for name, _ in found.model.named_parameters()}.union(*(each.writes for each in stages))
    last = plan.placement[-1]
    places = []
    for name in uses.weights:
        if name not in changes:
            continue  # a buffer that nobody writes is the same everywhere
        holders = tuple(each.index for each in stages if each.has(name))
        if all(plan.placement[index] != last for index in holders):
            ranks = tuple(sorted({plan.placement[index] for index in holders}))
            places.append(TrainedElsewhere("weight", name, holders, ranks))
    if places:
        raise make_foreign_error(places, "the loss")


def _check_cut(
    terms: PipelineTerms, found: Traced | Tree, plan: Plan, stages: Sequence[StageModule], loss: Loss, least: int
) -> tuple[Loss, Sequence[str]]:
    """Compare the stages with the model, and the loss of a batch with that of its samples; return the loss to train
    with, and the parameters that it is known not to depend on."""
    request, first = terms.request, terms.control.run_on_first_rank
    weight, unsplit_inputs = request.engine.loss_weight, request.engine.unsplit_inputs
    if not request.plan.check:
        return loss, ()
    times = plan.microbatches * terms.position.grid.replicas
    if times > 1:
        first(lambda: check_second_forward(request.model, terms.example, unsplit_inputs, times))
    first(
        lambda: compare_stages(
            request.model,
            found,
            stages,
            make_example_microbatch(terms.example, terms.wish, unsplit_inputs),
            terms.autocast,
        )
    )
    if request.targets is not None and (not isinstance(found, Traced) or found.both):
        several = make_example_microbatch({**terms.example, _TARGETS: request.targets}, terms.wish, unsplit_inputs)
        own = several.pop(_TARGETS)
        first(
            lambda: check_gradient_mode(
                request.model, stages, several, own, request.loss, weight, unsplit_inputs, terms.autocast
            )
        )
    if times == 1:
        return loss, ()
    # Where targets are not known, the loss is looked at in the first step, and here what it is of.
    known = None if request.targets is None else request.loss
    many = plan.profile.samples
    idle = first(
        lambda: check_samples(
            request.model, found, terms.example, request.targets, known, weight, unsplit_inputs, many, least
        )
    )
    # One sample meets no other, and without weights nothing is computed: then micro-batches are looked at.
    are_cut = isinstance(request.targets, Parts)
    is_known = first(
        lambda: (
            known is not None
            and (are_cut or has_samples(request.model, terms.example, request.targets, unsplit_inputs))
        )
    )
    looking = CountedTargets(FirstLook(loss, weight, times, is_known=is_known), weight, request.loss)
    return looking, idle if is_known else ()
