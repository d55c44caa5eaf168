"""Tell a status that no operator has written: the plan's only memory, changed by somebody who may.

Epochs that are forgotten would be given out twice, and restarts that are forgotten be charged again.
"""

from __future__ import annotations

from everstep_operator.api.status import TrainingJobStatus
from everstep_operator.plan.observation import MAX_EPOCHS_LOST


def undo_edit(known: TrainingJobStatus, found: TrainingJobStatus) -> TrainingJobStatus | None:
    """Return the status to go on from where one was found that no operator can have written, else None.

    Another operator's goes on from the one before: what only grows has not become less, and the phase is that of the
    last transition. An epoch that somebody has raised within reason stays: a gap is harmless.

    Args:
        known: The status that was stored last, as far as this process knows.
        found: The status that is stored now.
    """
    if known.phase is None or found == known:  # also where a server stores less of it than it was given
        return None
    leaps = found.epoch > known.epoch + MAX_EPOCHS_LOST
    torn = not found.transitions or found.transitions[-1].phase is not found.phase
    if not (leaps or torn or _tells_of_less(known, found) or _has_another_template(known, found)):
        return None
    return known if leaps else known.model_copy(update={"epoch": max(known.epoch, found.epoch)})


def _tells_of_less(known: TrainingJobStatus, found: TrainingJobStatus) -> bool:
    counts = [_list_counts(status) for status in (known, found)]
    last = [status.restarts.last.token if status.restarts.last is not None else (0, 0) for status in (known, found)]
    return last[1] < last[0] or any(after < before for before, after in zip(*counts, strict=True))


def _has_another_template(known: TrainingJobStatus, found: TrainingJobStatus) -> bool:
    """Return whether the template is one that was never resolved: it is not changed once it has an epoch, which was
    given out before."""
    if known.template is None or found.template is None:
        return False
    if found.template.epoch == known.template.epoch:
        return found.template != known.template
    return found.template.epoch > max(known.epoch, found.epoch)


def _list_counts(status: TrainingJobStatus) -> tuple[float, ...]:
    """Return what only grows."""
    usage = status.usage
    used = [0.0] * 4
    if usage is not None:
        used = [usage.until.timestamp(), usage.spot_node_seconds, usage.on_demand_node_seconds, usage.cost]
    return status.epoch, status.template.epoch if status.template is not None else 0, status.restarts.total, *used
