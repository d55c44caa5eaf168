"""Provide a CheckpointIO plugin for Lightning that publishes what the Trainer saves, and resumes from what is good.

    ckpt = EverstepCheckpointIO("s3://bucket/run", "out")
    saves = ModelCheckpoint("out", every_n_train_steps=500)
    trainer = Trainer(plugins=[ckpt], callbacks=[saves, Generators()], ...)
    trainer.fit(model, ckpt_path=ckpt.path())

For strategies that save one file by rank 0 (a single device, DDP): those that write and read checkpoints by themselves
are rejected when the training begins. Files of weights alone, and Lightning's own temporary ones (of its search for a
learning rate), are written and not published: no training goes on from them.

What Lightning itself needs to go on exactly, seen with 2.6: a loader with `state_dict` (torchdata's
StatefulDataLoader), since it begins an epoch anew with any other; and saves by `every_n_train_steps`, not at the end of
an epoch: there it saves before it steps the schedulers of interval "epoch" and does not step them when it resumes, so
that the learning rate of all later epochs is that of the one before. Nor has it drawn there what loaders draw when the
next epoch begins: a run that resumes from the last step of an epoch has other random numbers from there on.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import Callback, strategies
from torch.utils._pytree import tree_leaves

from everstep.checkpoint import events
from everstep.checkpoint.adapters.published import Published
from everstep.checkpoint.catalog.candidates import list_candidates
from everstep.checkpoint.errors import CheckpointError, Missing
from everstep.checkpoint.format.values import pack_value, unpack_value
from everstep.checkpoint.ranks.host_group import open_host_group
from everstep.checkpoint.state.rng import Rng
from everstep.coordination.group import RankGroup

_log = logging.getLogger("everstep.checkpoint")

_FILE = "lightning.ckpt"
_GENERATORS = "everstep_generators"
_COLLECTIVE_SECONDS = 1800.0  # as torch's own groups
_OWN_FILES = ("FSDPStrategy", "ModelParallelStrategy", "DeepSpeedStrategy")  # do not use a CheckpointIO


class EverstepCheckpointIO(TorchCheckpointIO):  # type: ignore[misc]  # lightning is not where types are checked
    """`folder` is where this node writes and restores; `keep_last` checkpoints stay in the store. None for what the job
    says, as in everstep.checkpointer.

    `finish_timeout`: seconds that the end of fit() waits at most until the last one is in the store; SaveFailed then.
    """

    def __init__(
        self,
        store: str | os.PathLike[str] | None,
        folder: str | os.PathLike[str],
        *,
        keep_last: int | None = None,
        finish_timeout: float = 600.0,
    ) -> None:
        super().__init__()
        self._published = Published(store, keep_last=keep_last, finish_timeout=finish_timeout)
        self._folder = Path(folder)

    def on(self, event: str, callback: events.Callback) -> None:
        """Call back with each event of this name: saved, restored, fell_back, failed, skipped. See Checkpointer.on."""
        self._published.on(event, callback)

    def path(self) -> str | None:
        """Return a path for `ckpt_path` that stands for the newest good checkpoint; None when none was ever published.

        All ranks agree on which one it is when Lightning loads it: it may not have started them yet.
        """
        return str(self._token) if list_candidates(self._published.store) else None

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write the file as Lightning does, and have it published beside training if a training can go on from it."""
        outgoing = self._folder / ".everstep-outgoing"
        shutil.rmtree(outgoing, ignore_errors=True)
        outgoing.mkdir(parents=True)
        try:
            super().save_checkpoint(checkpoint, outgoing / _FILE, storage_options)
            try:
                _link_in_place_of(outgoing / _FILE, path)
            except OSError:  # `path` is on another file system, or none at all, or its folder is not there yet
                super().save_checkpoint(checkpoint, path)
            if _is_of_training(checkpoint, path):
                self._published.publish(outgoing, int(checkpoint["global_step"]))
        finally:
            shutil.rmtree(outgoing, ignore_errors=True)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """Return the checkpoint that path() stands for, on all ranks alike; any other path is a file.

        NoGoodCheckpoint.
        """
        if Path(path) != self._token:
            return dict(super().load_checkpoint(path, map_location, weights_only))
        fetched = self._published.newest(lambda key: self._token.parent)
        if fetched is None:
            raise Missing(f"{self._published.store.url}/manifests")
        return dict(super().load_checkpoint(fetched / _FILE, map_location, weights_only))

    def teardown(self) -> None:
        """Lightning calls this at the end, after an error too; waits for the last checkpoint. SaveFailed."""
        super().teardown()
        self._published.finish()

    @property
    def _token(self) -> Path:
        return self._folder / ".everstep-restored" / _FILE


def _is_of_training(checkpoint: dict[str, Any], path: Any) -> bool:
    """Tell whether a training can go on from a checkpoint: the newest of these in the store is what a run goes on from.

    One of weights alone (`save_weights_only`) has no state of optimizers. What Lightning saves to go back to after a
    trial (Tuner, LearningRateFinder) has a hidden name, and in a run that begins again it is of step 0.
    """
    is_weights_alone = "state_dict" in checkpoint and "optimizer_states" not in checkpoint
    return not is_weights_alone and not Path(path).name.startswith(".")


def _link_in_place_of(ours: Path, path: Any) -> None:
    """Make `path` the same file as ours, in place of the file that it was: nothing is copied.

    Lightning itself writes into the file that is there, where it is on another file system than temporary files: that
    may be what an earlier save has left here, and is still being stored.
    """
    draft = Path(path).with_name(f".{Path(path).name}.{os.getpid()}")
    draft.hardlink_to(ours)
    try:
        draft.replace(path)
    except OSError:
        draft.unlink()
        raise


def _has_length(loader: Any) -> bool:
    try:
        return len(loader) >= 0
    except (TypeError, NotImplementedError):
        return False


class Generators(Callback):  # type: ignore[misc]  # lightning is not where types are checked
    """The random generators of every rank go on where they were: Lightning saves none, and dropout draws from them.

    With another number of ranks they begin anew.
    """

    def __init__(self) -> None:
        self._loaded: str | None = None
        self._group: RankGroup | None = None

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        """Lightning calls this before it restores. CheckpointError where it would publish nothing."""
        own = tuple(getattr(strategies, name) for name in _OWN_FILES if hasattr(strategies, name))
        is_own = isinstance(trainer.strategy, own)
        if stage == "fit" and is_own and isinstance(trainer.strategy.checkpoint_io, EverstepCheckpointIO):
            raise CheckpointError(
                f"{type(trainer.strategy).__name__} writes and reads checkpoints by itself, not by a plugin: a run "
                "could not go on from the store. Train with DDP, or shard the model in a loop of your own and save it "
                "by everstep.checkpointer()"
            )

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        """Lightning calls this on every rank; rank 0 writes what it finds."""
        if self._group is None:
            self._group = open_host_group(_COLLECTIVE_SECONDS, "on_save_checkpoint()")
        # As text: Lightning loads with weights_only, which lets no array of NumPy pass.
        checkpoint[_GENERATORS] = self._group.gather(json.dumps(pack_value(Rng().state_dict())))

    def teardown(self, trainer: Any, module: Any, stage: str) -> None:
        """Lightning calls this on every rank at the end."""
        group, self._group = self._group, None
        if group is not None:
            group.close()

    def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        states = checkpoint.get(_GENERATORS, [])
        self._loaded = states[trainer.global_rank] if len(states) == trainer.world_size else None

    def on_train_start(self, trainer: Any, module: Any) -> None:
        """Lightning calls this on every rank. Warns of loaders of which a resumed run leaves a batch out."""
        loaders = tree_leaves(getattr(trainer.train_dataloader, "flattened", trainer.train_dataloader))
        if trainer.is_global_zero and any(hasattr(each, "state_dict") and not _has_length(each) for each in loaders):
            _log.warning(
                "the loader of this training has no length: Lightning reads one batch of it ahead, and saves it as if "
                "that batch were trained, so that a run that is resumed leaves one batch out. Give it a length: "
                "everstep.data.Sampler(…, stop=STEPS), or an iterable dataset with __len__"
            )

    def on_train_batch_start(self, trainer: Any, *others: Any) -> None:
        # Not before: the beginning of a fit draws numbers too, for its loaders.
        if self._loaded is not None:
            Rng().load_state_dict(unpack_value(json.loads(self._loaded)))
            self._loaded = None
