"""Hugging Face's Trainer: its `checkpoint-N` folders are published whole, and one that is good is resumed from.

    ckpt = Checkpoints("s3://bucket/run", "out")
    trainer = Trainer(model, TrainingArguments("out", save_steps=500), callbacks=[ckpt], ...)
    trainer.train(resume_from_checkpoint=ckpt.path())

The local folder is only a place to write: whether it is torn, or gone with its node, does not matter. With several
nodes that do not share `out`, the random generators of other nodes than the first are not saved, as with the Trainer
itself; and where every rank writes its own share of the state (FSDP with sharded state, DeepSpeed), the first save is
an error on all ranks, since nobody could ever go on from it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from everstep.checkpoint.adapters.published import Published

_GENERATORS = "rng_state*.pth"


class Checkpoints(TrainerCallback):  # type: ignore[misc]  # transformers is not where types are checked
    """A callback that publishes what the Trainer saves into `output_dir`; `keep_last` of them stay in the store."""

    def __init__(
        self, store: str | os.PathLike[str], output_dir: str | os.PathLike[str], *, keep_last: int = 3
    ) -> None:
        self._published = Published(store, keep_last=keep_last)
        self._folder = Path(output_dir)

    def path(self) -> str | None:
        """For `resume_from_checkpoint`, on all ranks, once the Trainer is made: the newest folder that is good.

        None when none was ever published. NoGoodCheckpoint when all are bad.
        """
        # Under the Trainer's own name, from which it tells what is old.
        found = self._published.newest(lambda key: self._named(key.step))
        return None if found is None else str(found)

    def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """The Trainer calls this on every rank when it has written a folder. CheckpointError, see above."""
        self._published.see(self._named(state.global_step), own=_GENERATORS)
        if state.is_world_process_zero:
            self._published.publish(self._named(state.global_step), state.global_step)

    def _named(self, step: int) -> Path:
        return self._folder / f"{PREFIX_CHECKPOINT_DIR}-{step}"
