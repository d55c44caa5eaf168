"""Hugging Face's Trainer: its `checkpoint-N` folders are published whole, and one that is good is resumed from.

    ckpt = EverstepCallback("s3://bucket/run", "out")
    trainer = Trainer(model, TrainingArguments("out", save_steps=500), callbacks=[ckpt], ...)
    trainer.train(resume_from_checkpoint=ckpt.path())

The local folder is only a place to write: whether it is torn, or gone with its node, does not matter. With several
nodes that do not share `out`, the random generators of other nodes than the first are not saved, as with the Trainer
itself; and where every rank writes its own share of the state (FSDP with sharded state, DeepSpeed), the first save is
an error on all ranks, since nobody could ever go on from it.

Folders are stored beside training (background.py), with what other callbacks have put into them in on_save(), before or
after this one; the end of train() waits for the last one.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from everstep.checkpoint.adapters.published import Published
from everstep.checkpoint.errors import CheckpointError
from everstep.checkpoint.events import Callback

_log = logging.getLogger("everstep.checkpoint")

_GENERATORS = "rng_state*.pth"
_NAMED = re.compile(rf"(?:^|[/\\]){PREFIX_CHECKPOINT_DIR}-(\d+)[/\\]?$", re.ASCII)


class EverstepCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not where types are checked
    """A callback that publishes what the Trainer saves into `output_dir`; `keep_last` of them stay in the store. None
    for what the job says, as in everstep.checkpointer.

    `finish_timeout`: seconds that the end of train() waits at most until the last one is in the store; SaveFailed then.
    """

    def __init__(
        self,
        store: str | os.PathLike[str] | None,
        output_dir: str | os.PathLike[str],
        *,
        keep_last: int | None = None,
        finish_timeout: float = 600.0,
    ) -> None:
        self._published = Published(store, keep_last=keep_last, finish_timeout=finish_timeout)
        self._folder = Path(output_dir)
        self._told_of_trials = False
        self._loads_best = True  # until the Trainer says that it does not
        # A step and the best folder that it needs: saved, and not handed over before all callbacks have seen it.
        self._saved: tuple[int, tuple[Path, int] | None] | None = None
        self._known: dict[int, int] = {}  # when each folder was written that needs no publication any more, by step

    def on(self, event: str, callback: Callback) -> None:
        """Call back with each event of this name: saved, restored, fell_back, failed, skipped. See Checkpointer.on."""
        self._published.on(event, callback)

    def path(self) -> str | None:
        """Return the newest folder that is good, for `resume_from_checkpoint`, on all ranks, once the Trainer is made.

        With `load_best_model_at_end` the best one is brought back beside it: the Trainer takes its model at the end, or
        without a word the last one where it is not there. A folder whose best one is not good is not good either.

        Returns:
            The folder's path; None when none was ever published.

        Raises:
            NoGoodCheckpoint: All are bad.
        """
        self._saved = None  # of a training that failed in the middle of its save
        # Under the Trainer's own name, from which it tells what is old.
        found = self._published.newest(lambda key: self._named(key.step), needed_step=self._best_step)
        if found is None:
            return None
        self._published.change(found, lambda: self._name_best_here(found))
        return str(found)

    def on_init_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """The Trainer calls this when it is made. CheckpointError where it saves into another folder than this one."""
        self._check_folder(args)
        self._loads_best = bool(args.load_best_model_at_end)

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """The Trainer calls this before it trains: it may write into folders of a training before, in place.

        CheckpointError where it saves into another folder by now.
        """
        self._check_folder(args)
        self._hand_over()
        if state.is_world_process_zero:
            _warn_of_one_more_step(state)
            self._published.begin_training()
        self._known = self._find_written()

    def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """The Trainer calls this on every rank when it has written a folder. CheckpointError, see above."""
        self._hand_over()
        # Rank 0 says it for all: others may not know of a trial. Its folders lie in one of the trial's own: what has
        # their names in `output_dir` is of another training.
        if self._published.hear_first(_is_of_trial(state)):
            if state.is_world_process_zero and not self._told_of_trials:
                _log.warning("what trials of hyperparameter_search() save is not published")
            self._told_of_trials = True
            return
        self._published.see(self._named(state.global_step), own=_GENERATORS)
        if state.is_world_process_zero:
            self._note_saved(state, state.global_step)

    # A callback behind this one may still write into the folder in its on_save: it is complete at the next event,
    # whichever that is. The Trainer removes no folder before that.

    def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """The Trainer calls this before a step."""
        self._hand_over()

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """The Trainer calls this before an epoch."""
        self._hand_over()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """The Trainer calls this after an epoch, and before it saves at its end."""
        self._hand_over()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **others: Any) -> None:
        """The Trainer calls this in training, and when that has ended, before it removes folders."""
        self._hand_over()
        if "train_runtime" in (logs or {}):
            self._see_untold(args, state)

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """The Trainer calls this on every rank at the end; waits for the last folder. SaveFailed."""
        self._hand_over()
        self._see_untold(args, state)
        self._published.finish()

    def _check_folder(self, args: Any) -> None:
        """See that the Trainer saves into the folder that is published; a script may change its arguments."""
        if Path(args.output_dir).resolve() != self._folder.resolve():
            raise CheckpointError(
                f"the Trainer saves into {args.output_dir}, and this callback publishes what is saved into "
                f"{self._folder}: give both the same folder"
            )

    def _note_saved(self, state: Any, step: int) -> None:
        named = getattr(state, "best_model_checkpoint", None) if self._loads_best else None
        best = _step_of(named)
        needed = None if best is None or best == step else (Path(str(named)), best)
        self._saved = step, needed

    def _see_untold(self, args: Any, state: Any) -> None:
        """Have the folder published that the Trainer has written after SIGTERM, without a word to callbacks.

        All ranks call it when training has ended.
        """
        if not getattr(args, "enable_jit_checkpoint", False) or _is_of_trial(state):
            return
        written = self._find_written().items() - self._known.items()
        step = self._published.hear_first(max((step for step, _ in written), default=None))
        if step is not None:
            self._published.see(self._named(step), own=_GENERATORS)
            if state.is_world_process_zero:
                self._note_saved(state, step)
                self._hand_over()

    def _hand_over(self) -> None:
        """Have the folder published that was saved last, if it was not handed over yet."""
        saved, self._saved = self._saved, None
        if saved is not None:
            step, needed = saved
            self._published.publish(self._named(step), step, needed=needed)
            self._known |= self._find_written(step)

    def _find_written(self, step: int | str = "*") -> dict[int, int]:
        """Return when the Trainer has written its folders, or that of one step: by step, in ns."""
        found: dict[int, int] = {}
        for state in self._folder.glob(f"{PREFIX_CHECKPOINT_DIR}-{step}/{TRAINER_STATE_NAME}"):
            with suppress(OSError):  # another rank removes it
                if (number := _step_of(state.parent)) is not None:
                    found[number] = state.stat().st_mtime_ns
        return found

    def _named(self, step: int) -> Path:
        return self._folder / f"{PREFIX_CHECKPOINT_DIR}-{step}"

    def _best_step(self, path: Path) -> int | None:
        """Return the step of the best folder that a folder names, where the Trainer is to load that at the end."""
        named = _read_state(path).get("best_model_checkpoint")
        if named is None or not self._loads_best:
            return None
        if _step_of(named) is None:
            raise CheckpointError(
                f"{path / TRAINER_STATE_NAME} names {named} as the best checkpoint, which no {PREFIX_CHECKPOINT_DIR}-N "
                "folder is: it cannot be brought back; go on with load_best_model_at_end=False"
            )
        return _step_of(named)

    def _name_best_here(self, path: Path) -> None:
        """Have a folder name the best one where that is on this machine, and not where it was on the machine before."""
        state = _read_state(path)
        step = _step_of(state.get("best_model_checkpoint"))
        if step is None or state["best_model_checkpoint"] == str(self._named(step)) or not self._named(step).is_dir():
            return
        state["best_model_checkpoint"] = str(self._named(step))
        new = path / f".everstep-{secrets.token_hex(4)}"
        new.write_text(json.dumps(state, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        new.replace(path / TRAINER_STATE_NAME)


def _warn_of_one_more_step(state: Any) -> None:
    """Warn where the Trainer would train on though it has made its last step: within an epoch it looks after a step."""
    if state.global_step >= state.max_steps and state.epoch is not None and state.epoch % 1:
        _log.warning(
            "this training has made its last step, %d, within an epoch: the Trainer makes one more each time that it "
            "is started again. Load the model from the folder of that step, and do not call train()",
            state.max_steps,
        )


def _is_of_trial(state: Any) -> bool:
    """Tell whether a training is a trial of a search.

    Not by `is_hyper_param_search`, which a training that goes on from a trial's folder has from there.
    """
    return getattr(state, "trial_params", None) is not None


def _read_state(path: Path) -> dict[str, Any]:
    try:
        found = json.loads((path / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return found if isinstance(found, dict) else {}


def _step_of(path: object) -> int | None:
    """Return the step of a folder as the Trainer names it, wherever it is; None for none, and for any other name."""
    found = _NAMED.search(str(path))
    return int(found[1]) if found else None
