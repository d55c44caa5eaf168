"""Hugging Face's Trainer: its `checkpoint-N` folders are published whole, and one that is good is resumed from.

    ckpt = Checkpoints("s3://bucket/run", "out")
    trainer = Trainer(model, TrainingArguments("out", save_steps=500), callbacks=[ckpt], ...)
    trainer.train(resume_from_checkpoint=ckpt.path())

The local folder is only a place to write: whether it is torn, or gone with its node, does not matter. With several
nodes that do not share `out`, the random generators of other nodes than the first are not saved, as with the Trainer
itself; and where every rank writes its own share of the state (FSDP with sharded state, DeepSpeed), the first save is
an error on all ranks, since nobody could ever go on from it.

Folders are stored beside training (background.py); the end of train() waits for the last one.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from everstep.checkpoint.adapters.published import Published
from everstep.checkpoint.events import Callback

_GENERATORS = "rng_state*.pth"


class Checkpoints(TrainerCallback):  # type: ignore[misc]  # transformers is not where types are checked
    """A callback that publishes what the Trainer saves into `output_dir`; `keep_last` of them stay in the store.

    `finish_timeout`: seconds that the end of train() waits at most until the last one is in the store; SaveFailed then.
    """

    def __init__(
        self,
        store: str | os.PathLike[str],
        output_dir: str | os.PathLike[str],
        *,
        keep_last: int = 3,
        finish_timeout: float = 600.0,
    ) -> None:
        self._published = Published(store, keep_last=keep_last, finish_timeout=finish_timeout)
        self._folder = Path(output_dir)

    def on(self, event: str, callback: Callback) -> None:
        """Call back with each event of this name: saved, restored, fell_back, failed, skipped. See Checkpointer.on."""
        self._published.on(event, callback)

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

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """The Trainer calls this on every rank at the end; waits for the last folder. SaveFailed."""
        self._published.finish()

    def _named(self, step: int) -> Path:
        return self._folder / f"{PREFIX_CHECKPOINT_DIR}-{step}"
