"""Map processes to ranks and replicas. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

from everstep.pipeline.errors import PipelineError

STRATEGIES = {"cluster": "DPT", "spread": "TPD"}


@dataclass(frozen=True)
class Grid:
    """`processes[replica][rank]`: the process, by its number among all, that is this rank of this pipeline."""

    processes: tuple[tuple[int, ...], ...]

    @property
    def replicas(self) -> int:
        return len(self.processes)

    @property
    def ranks(self) -> int:
        return len(self.processes[0])

    def find(self, process: int) -> tuple[int, int]:
        """The replica and the rank of a process. PipelineError if it has none."""
        for replica, ranks in enumerate(self.processes):
            if process in ranks:
                return replica, ranks.index(process)
        raise PipelineError(f"process {process} has no place in a grid of {self.replicas} × {self.ranks}")


def make_grid(processes: int, ranks: int, placement: str = "cluster") -> Grid:
    """`processes` as pipelines of `ranks` each.

    `placement` is an order of the letters D (data parallel), P (pipeline) and T (tensor parallel, always 1 here), of
    which the right-most changes between neighbouring processes; `cluster` is DPT, `spread` TPD. PipelineError.
    """
    letters = STRATEGIES.get(placement, placement)
    if sorted(letters) != sorted("DPT"):
        raise PipelineError(f"placement is cluster, spread or an order of the letters D, P, T, not {placement!r}")
    if ranks < 1 or processes % ranks:
        raise PipelineError(f"{processes} processes are no whole number of pipelines of {ranks} ranks")
    replicas = processes // ranks
    apart = letters.index("P") < letters.index("D")  # ranks of one pipeline are replicas apart
    return Grid(
        tuple(
            tuple(rank * replicas + replica if apart else replica * ranks + rank for rank in range(ranks))
            for replica in range(replicas)
        )
    )
