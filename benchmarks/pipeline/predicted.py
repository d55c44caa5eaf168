"""Row `predicted`: how far steps are from what the plan said of them, over models, schedules, splits and micro-batches.

A model is measured on both ranks as `everstep.pipeline.pipeline` does it, and a configuration is predicted from that
alone: what the plan would print. Then it trains, on two real ranks of one processor each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from statistics import median

from benchmarks.interval import REPEATS, Interval
from benchmarks.pipeline.ranks import alternate, run
from everstep.pipeline.plan import Plan
from everstep.pipeline.planning import Wish, solve_again
from everstep.pipeline.schedules import make_schedule

MOST = 0.05
NAMES = ("gpt", "convolutions", "tower")
SCHEDULES = ("simple", "1f1b", "zb-h1", "interleaved", "zb-v")
MICROBATCHES = (4, 8)
#: Where the model is cut by hand, beside the split that is found: after this share of its nodes.
CUTS = (0.35, 0.65)


def row() -> Interval:
    result = Interval("predicted", "of the step", MOST, absolute=True)
    errors: list[float] = []
    for name in NAMES:
        for configuration, (seconds, measured) in run(2, of_model, name)[0].items():
            errors.append(abs(seconds - median(measured)) / median(measured))
            result.samples[f"{configuration}: predicted"] = [seconds]
            result.samples[f"{configuration}: measured"] = measured
    result.samples["ours"] = errors
    return result


def of_model(rank: int, name: str) -> dict[str, tuple[float, list[float]]]:
    """Return, for each configuration, the seconds predicted, and those of each step."""
    import torch

    from benchmarks.pipeline.models import MODELS
    from everstep.pipeline.engine.engine import Engine
    from everstep.pipeline.engine.options import EngineOptions
    from everstep.pipeline.frontend.split import split_model
    from everstep.pipeline.prepare import ProcessPosition, ProfileRequest, look_into, make_plan
    from everstep.pipeline.transport.control import Control
    from everstep.pipeline.transport.gloo import ProcessGroups
    from everstep.pipeline.transport.grid import make_grid

    torch.manual_seed(0)
    case = MODELS[name]
    model = case.build()
    batch, targets = case.batch(max(MICROBATCHES) * case.samples)
    example = {each: value[: MICROBATCHES[0] * case.samples] for each, value in batch.items()}
    found = look_into(model, example, None)
    place = ProcessPosition(make_grid(2, 2), Control(1800.0), torch.device("cpu"))
    wish = Wish(2, 2, (MICROBATCHES[0],), MICROBATCHES[0] * case.samples, "1f1b")
    transport = ProcessGroups(place.grid)
    results = {}
    for configuration, variant in _configurations():
        # Measured anew for each: a machine that others use too is not as fast a minute later.
        known = targets[: MICROBATCHES[0] * case.samples]
        made = variant(make_plan(model, found, example, wish, place, ProfileRequest(loss=case.loss, targets=known)))
        parts = split_model(found, made.stage_of)
        actions = made.prove()
        own = {index: parts[index] for index in actions.stages_of(rank)}
        engine = Engine(own, actions, made.stages, transport, case.loss, EngineOptions(broadcast=False))
        samples = made.microbatches * case.samples
        step = partial(engine.step, {each: value[:samples] for each, value in batch.items()}, targets[:samples])
        results[f"{name}, {configuration}"] = made.predict().seconds, alternate({"": step}, REPEATS).wall[""]
        engine.close()
    return results


def _configurations() -> Iterator[tuple[str, Callable[[Plan], Plan]]]:
    """Return the configurations that are made of a plan of two stages by 1F1B."""
    for schedule in SCHEDULES:
        for microbatches in MICROBATCHES:
            yield f"{schedule}, {microbatches} micro-batches", partial(_scheduled, schedule, microbatches)
    for cut in CUTS:
        yield f"1f1b, cut after {cut:.0%} of the nodes", partial(_cut, cut)


def _scheduled(schedule: str, microbatches: int, plan: Plan) -> Plan:
    if schedule in ("interleaved", "zb-v"):
        wish = Wish(2, 4, (MICROBATCHES[0],), MICROBATCHES[0] * plan.profile.samples, "interleaved")
        plan = solve_again(plan, wish)
    return plan.changed(schedule=make_schedule(schedule, len(plan.placement), 2, microbatches))


def _cut(share: float, plan: Plan) -> Plan:
    nodes = [node.name for node in plan.profile.graph.nodes]
    return replace(plan, stage_of={name: int(index >= share * len(nodes)) for index, name in enumerate(nodes)})
