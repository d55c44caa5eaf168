"""The job's checkpoints, out of what its ranks say: the newest one, failed saves, and what a generation began from."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from everstep.agent.wire.protocol import RankProgress
from everstep.agent.wire.rank_checkpoint import RankCheckpoint

from .step_rate import StepRate


class CheckpointMeter:
    """A meter of the lowest rank that says anything of checkpoints: a save is of all ranks, and they agree."""

    def __init__(self) -> None:
        self.step: int | None = None  # of the newest checkpoint that is in the store
        self._bytes: int | None = None
        self._at = 0.0  # time of day at which it was heard of
        self._failed = 0
        self._restored: dict[str, Any] | None = None
        self._teller = -1
        self._said = RankCheckpoint()
        self._rate = StepRate()
        # The last steps of generations since the last restore that was told: a generation may end before it tells its
        # own, as who saves by itself does at its first save. None is known of those that another leader heard.
        self._before: list[int] = []
        self._counts: tuple[int, int] | None = None  # one moment as checkpoints and as progress count it
        self._trained: int | None = None  # the last step of this generation, where ranks tell that
        self._paced: int | None = None  # the last step that the rate knows

    @property
    def ranks_save(self) -> bool:
        """Return whether ranks of this generation have spoken of checkpoints, and save when they are asked to."""
        return self._said != RankCheckpoint() and self._said.takes_requests != 0

    @property
    def counted_step(self) -> int | None:
        """Return the last step of this generation by the numbers of its checkpoints; None where it is not told in each
        step, as by ranks that save by themselves."""
        return None if self._said.takes_requests == 0 else self._said.trained_step

    def find_trained_step(self, last_step: int | None) -> int | None:
        """Return the last step of this generation, counted as its checkpoints are if ranks tell that.

        Who saves by itself tells it at each save. The steps since then are those of its progress, whatever that counts:
        what a restart loses is counted from a save on.

        Args:
            last_step: The last step that its ranks have reported as their progress, which may count something else.
        """
        told = self._said.trained_step
        if self.counted_step is not None or last_step is None or self._counts is None:
            return last_step if told is None else told
        trained, progress = self._counts
        return max(told or 0, trained + last_step - progress)

    def restart(self, last_step: int | None) -> None:
        """Begin a new generation.

        Args:
            last_step: The last step of the one before it, as its progress has it; None where no rank has reported one.
        """
        last_step = self.find_trained_step(last_step)
        if self._said.restored is not None:  # what was lost before it is told already
            self._before = []
            last_step = self._said.restored if last_step is None else last_step
        if last_step is not None:
            self._before.append(last_step)
        self._teller, self._said, self._trained, self._paced = -1, RankCheckpoint(), None, None
        self._rate.restart()

    def update(self, wall: float, generation: tuple[int, int], ranks: Iterable[RankProgress]) -> bool:
        """Take in what ranks say.

        Args:
            wall: The time of day, in seconds.
            generation: Epoch and generation of the ranks.
            ranks: Those that have said something.

        Returns:
            Whether something of it is news that cannot wait: a restore, or a save that failed.
        """
        news = False
        for rank in ranks:
            if rank.checkpoint is None or (0 <= self._teller < rank.rank):
                continue
            said, before = rank.checkpoint, self._said
            self._teller, self._said = rank.rank, said
            news |= (said.restored, said.checkpoints_failed or 0) != (before.restored, before.checkpoints_failed or 0)
            if said.checkpoint is not None and said.checkpoint not in (before.checkpoint, self.step):
                self.step, self._bytes, self._at = said.checkpoint, said.checkpoint_bytes, wall
            if said.trained_step is not None:
                if said.trained_step != before.trained_step:
                    self._note_counts(said, rank.step)
                self._trained = self.find_trained_step(rank.step)
                self._note_pace(wall, rank.step)
            if said.checkpoints_failed is not None:
                self._failed = said.checkpoints_failed
            if said.restored is not None and said.restored != before.restored:
                self._restored = self._describe_restore(generation, said)
        return news

    def _note_counts(self, said: RankCheckpoint, progress: int | None) -> None:
        # Words of a whole heartbeat come together; who tells it in each step says nothing more.
        if said.takes_requests == 0 and said.progress_step is not None:
            progress = said.progress_step
        if said.trained_step is not None and progress is not None:
            self._counts = said.trained_step, progress

    def _note_pace(self, wall: float, progress: int | None) -> None:
        # What is lost of who saves by itself are steps of its progress: by the numbers of checkpoints they go back with
        # each save.
        step = self._trained if self.counted_step is not None or progress is None else progress
        if step is not None and step != self._paced:
            self._rate.note(wall, step)
        self._paced = step

    def to_json(self) -> dict[str, Any] | None:
        """Return what `/v1/state` says; None where no rank has said anything."""
        if self.step is None and self._restored is None and not self._failed:
            return None
        return {
            "step": self.step,
            "bytes": self._bytes,
            "stallSeconds": None if self._said.stall_ms is None else self._said.stall_ms / 1000,
            "at": self._at or None,
            "failedSaves": self._failed,
            "every": self._said.save_every,
            "trainedStep": self._trained,
            "stepsPerSecond": self._rate.steps_per_second,
            "restored": self._restored,
        }

    def _describe_restore(self, generation: tuple[int, int], said: RankCheckpoint) -> dict[str, Any]:
        step = said.restored or 0
        return {
            "id": f"{generation[0]}.{generation[1]}",
            "step": step,
            "tier": said.restored_from or "",
            "seconds": None if said.restored_ms is None else said.restored_ms / 1000,
            "passedOver": said.restored_over or 0,
            "lostSteps": sum(max(0, last - step) for last in self._before) if self._before else None,
        }
