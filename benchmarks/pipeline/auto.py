"""Rows `auto-vs-even-*` and `auto-vs-best-*`: the automatic plan of a model with a heavy head, run for real, against
the splits of others.

The model is measured on both ranks and planned as `everstep.pipeline.pipeline` does it, its schedule too; the splits of
others run by 1F1B, with as many micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from statistics import median

from benchmarks.interval import REPEATS, Interval
from benchmarks.pipeline.baselines import BASELINES
from benchmarks.pipeline.ranks import alternate, run

FASTER = 1 / 1.15
MICROBATCHES, SCHEDULE = 8, "1f1b"
#: Words, width, layers: the head takes as long as several layers.
MODELS = {"gpt-32k-words": (32768, 256, 12), "gpt-8k-words": (8192, 256, 8)}
SAMPLES, TOKENS = 2, 128


def rows(wanted: Collection[str]) -> Iterator[Interval]:
    for name in MODELS:
        kinds = [kind for kind in ("auto-vs-even", "auto-vs-best") if {kind, f"{kind}-{name}"} & set(wanted)]
        if not kinds:
            continue
        samples, same = run(2, measured, name)[0]
        if "auto-vs-even" in kinds:
            row = Interval(f"auto-vs-even-{name}", "s", FASTER)
            row.samples = {"ours": samples["auto"], "floor": samples["even"]}
            yield row
        if "auto-vs-best" in kinds:
            best = min(BASELINES, key=lambda each: median(samples[each]))
            row = Interval(f"auto-vs-best-{name}", "s", 1.0)
            # The same split has the same time, whatever noise says.
            row.samples = {"ours": samples["auto"], "floor": samples["auto" if best in same else best]}
            row.samples |= {each: samples[each] for each in BASELINES}
            yield row


def measured(rank: int, name: str) -> tuple[dict[str, list[float]], list[str]]:
    """Return the seconds of steps of each split, and which splits are the plan's own."""
    import torch

    from benchmarks.pipeline.models import Gpt, text
    from everstep.pipeline.engine.engine import Engine
    from everstep.pipeline.engine.options import EngineOptions
    from everstep.pipeline.frontend.placement import complete_placement
    from everstep.pipeline.frontend.split import split_model
    from everstep.pipeline.graph import stage_graph
    from everstep.pipeline.partition.blocks import assign_nodes, contract_graph
    from everstep.pipeline.planning import Wish
    from everstep.pipeline.prepare import ProcessPosition, look_into, make_plan
    from everstep.pipeline.schedules import lower_schedule, make_schedule
    from everstep.pipeline.transport.control import Control
    from everstep.pipeline.transport.gloo import ProcessGroups
    from everstep.pipeline.transport.grid import make_grid

    torch.manual_seed(0)
    words, width, layers = MODELS[name]
    batch, targets = text(words, TOKENS)(SAMPLES * MICROBATCHES)
    model = Gpt(words, width, layers)
    found = look_into(model, batch, None)
    place = ProcessPosition(make_grid(2, 2), Control(1800.0), torch.device("cpu"))
    made = make_plan(model, found, batch, Wish(2, None, (MICROBATCHES,), len(targets)), place)
    graph = made.profile.graph
    blocks = contract_graph(graph)
    splits: dict[str, Mapping[str, int]] = {"auto": made.stage_of}
    orders = {"auto": (made.prove(), made.stages)}
    for each, other in BASELINES.items():
        splits[each] = assign_nodes(blocks, other(blocks, 2))
        stages = stage_graph(graph, complete_placement(found.graph, splits[each]))
        orders[each] = lower_schedule(make_schedule(SCHEDULE, 2, 2, MICROBATCHES), stages), stages
    transport = ProcessGroups(place.grid)
    arms: dict[str, Callable[[], object]] = {}
    for each, (order, stages) in orders.items():
        parts = split_model(found, splits[each])
        own = {index: parts[index] for index in order.stages_of(rank)}
        engine = Engine(own, order, stages, transport, lambda loss, labels: loss, EngineOptions(broadcast=False))
        arms[each] = partial(engine.step, batch, targets)
    same = [each for each in BASELINES if splits[each] == splits["auto"] and made.schedule_name == SCHEDULE]
    return alternate(arms, REPEATS).wall, same
