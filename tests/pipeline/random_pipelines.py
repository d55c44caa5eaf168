"""Random pipelines: any schedule, stages that may or may not split, values that skip stages, shared parameters."""

from __future__ import annotations

from hypothesis import strategies as st

from everstep.pipeline.graph import Edge, Stage, StageGraph
from everstep.pipeline.schedules import NAMES, Schedule, make_schedule

CHUNKS = {"1f1b": st.just(1), "zb-h1": st.just(1), "zb-v": st.just(2)}


@st.composite
def stage_graphs(draw: st.DrawFn, stages: int) -> StageGraph:
    """Every value goes to one to three stages above its own; some have no gradient. Times and sizes are whole numbers,
    so that sums of them are exact."""
    edges: list[Edge] = []
    for source in range(stages - 1):
        above = st.lists(st.integers(source + 1, stages - 1), min_size=1, max_size=3, unique=True)
        for number, targets in enumerate(draw(st.lists(above, max_size=2))):
            gradient = draw(st.integers(0, 4)) > 0
            size = draw(st.integers(0, 9))
            edges.append(Edge(f"v{source}.{number}", source, tuple(sorted(targets)), size, gradient))
    owners = st.lists(st.integers(0, stages - 1), min_size=2, max_size=3, unique=True)
    ties = draw(st.lists(owners, max_size=2)) if stages > 2 else []
    small = st.integers(1, 5)
    return StageGraph(
        tuple(
            draw(
                st.lists(
                    st.builds(Stage, small, small, small, small, unsplit=st.none() | small),
                    min_size=stages,
                    max_size=stages,
                )
            )
        ),
        tuple(edges),
        tuple((f"w{index}", tuple(sorted(who))) for index, who in enumerate(ties)),
    )


@st.composite
def pipelines(draw: st.DrawFn, most_ranks: int = 3, most_microbatches: int = 4) -> tuple[Schedule, StageGraph]:
    """The computations of a schedule, and what flows between its stages."""
    name = draw(st.sampled_from(NAMES))
    ranks, microbatches = draw(st.integers(1, most_ranks)), draw(st.integers(1, most_microbatches))
    stages = ranks * draw(CHUNKS.get(name, st.integers(1, 3)))
    split = draw(st.none() | st.sets(st.integers(0, stages - 1)))
    return make_schedule(name, stages, ranks, microbatches, split), draw(stage_graphs(stages))
