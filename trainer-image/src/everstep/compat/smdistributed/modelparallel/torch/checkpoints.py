"""`smp.save`, `smp.load`, `smp.save_checkpoint` and `smp.resume_from_checkpoint`, with the documented file tree."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from everstep.compat.smdistributed.modelparallel.torch.optimizer import is_sharded
from everstep.compat.smdistributed.modelparallel.torch.ranks import dp_rank, mp_rank, rank, rdp_rank
from everstep.compat.smdistributed.modelparallel.torch.state import SmpState, current_state

NEWEST = "newest"


def save(obj: Any, f: Any, partial: bool = True, **options: Any) -> None:
    """Save as torch.save does; `partial`: a file of its own for each process of the model, `f` with `_<mp_rank>`
    behind.

    A script calls it where smp.dp_rank() is 0.
    """
    _save_atomically(obj, Path(f"{f}_{mp_rank()}" if partial else f), **options)


def load(f: Any, map_location: Any = None, partial: bool = True, **options: Any) -> Any:
    """Load as torch.load does, what smp.save has written; all processes call it."""
    options.setdefault("weights_only", False)
    return torch.load(f"{f}_{mp_rank()}" if partial else f, map_location=map_location, **options)


def save_checkpoint(
    path: Any,
    tag: str,
    partial: bool = True,
    model: Any = None,
    optimizer: Any = None,
    user_content: Any = None,
    translate_if_full: bool = True,
    num_kept_partial_checkpoints: int | None = None,
) -> None:
    """Save the model, the optimizer and the user content; all processes call it.

    `newest` names the checkpoint once all files are there.

    Args:
        path: The folder of all checkpoints.
        tag: Name of this one.
        partial: Whether each process writes files of its own under `<tag>_partial`, with the partition; else `<tag>`
            has the whole model's state dictionary, and `optimizer_<tag>` the whole optimizer's.
        model: The model; by default the script's.
        optimizer: The optimizer, if it is saved.
        user_content: Anything that torch.save takes.
        translate_if_full: Changes nothing: names are the model's own.
        num_kept_partial_checkpoints: So many of the newest partial ones stay; None: all.
    """
    if num_kept_partial_checkpoints is not None and num_kept_partial_checkpoints < 1:
        raise ValueError(f"num_kept_partial_checkpoints is {num_kept_partial_checkpoints}: it must be 1 or more")
    now, folder = current_state(), Path(path)
    model = now.model if model is None else model
    if partial:
        _save_partial(now, folder / f"{tag}_partial", model, optimizer, user_content)
    else:
        whole = None if model is None else model.state_dict()
        whole_optimizer = None if optimizer is None else optimizer.state_dict()
        if rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
            _save_atomically(whole, folder / tag)
            if whole_optimizer is not None:
                _save_atomically(whole_optimizer, folder / f"optimizer_{tag}")
            if user_content is not None:
                _save_atomically(user_content, folder / f"user_content_{tag}")
    dist.barrier()
    if rank() == 0:
        _write_text(tag, folder / NEWEST)
        if partial and num_kept_partial_checkpoints is not None:
            found = sorted(folder.glob("*_partial"), key=lambda each: each.stat().st_mtime_ns)
            for old in found[: max(0, len(found) - num_kept_partial_checkpoints)]:
                shutil.rmtree(old)
    dist.barrier()


def _save_partial(now: SmpState, folder: Path, model: Any, optimizer: Any, user_content: Any) -> None:
    if dp_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        if model is not None:
            kept = {"model": model.local_state_dict(), "partition": model.stage_of, "engine": model.engine_state()}
            _save_atomically(kept, folder / f"model_{mp_rank()}.pt")
        if now.config.half and model is not None:
            _save_atomically(model.engine_state(), folder / f"fp16_states_{mp_rank()}.pt")
    if rank() == 0:
        _save_atomically(user_content, folder / "user_content.pt")
    if optimizer is not None and (dp_rank() == 0 or is_sharded()):
        folder.mkdir(parents=True, exist_ok=True)
        _save_atomically(optimizer.local_state_dict(), folder / _optimizer_file())


def _optimizer_file() -> str:
    """Return the name of the optimizer's file of this process, or of all replicas of its stage."""
    return f"optimizer_{mp_rank()}_{rdp_rank()}.pt" if is_sharded() else f"optimizer_{mp_rank()}.pt"


def resume_from_checkpoint(
    path: Any,
    tag: str | None = None,
    partial: bool = True,
    strict: bool = True,
    load_optimizer: bool = True,
    load_sharded_optimizer_state: bool = True,
    translate_function: Any = None,
) -> Any:
    """Load into the model and the optimizer of the script, before the first step; return the user content.

    A partial checkpoint brings its partition, which then cannot be another; a full one fits any.

    Args:
        path: The folder of all checkpoints.
        tag: Name of the one to load; None for the newest.
        partial: Whether it is partial.
        strict: As in torch's load_state_dict.
        load_optimizer: Whether the optimizer is loaded too.
        load_sharded_optimizer_state: Changes nothing: it is for sharded data parallelism.
        translate_function: Called with what a full checkpoint has of the model.

    Raises:
        FileNotFoundError: There is none.
    """
    now, folder = current_state(), Path(path)
    if now.model is None:
        raise RuntimeError("smp.DistributedModel must wrap the model before a checkpoint is loaded")
    if tag is None:
        if not (folder / NEWEST).is_file():
            raise FileNotFoundError(
                f"{folder} has no file {NEWEST!r}, so no checkpoint: name one by tag=, or begin anew"
            )
        tag = (folder / NEWEST).read_text().strip()
    optimizer = now.optimizers[0] if load_optimizer and now.optimizers else None
    if partial:
        source = folder / f"{tag}_partial"
        _check_same_degree(source, now)
        found = _load_file(source / f"model_{mp_rank()}.pt")
        now.model.set_partition(found["partition"])
        now.model.load_state_dict(found["model"], strict)
        now.model.load_engine_state(found["engine"])
        kept = source / _optimizer_file()
        content = source / "user_content.pt"
    else:
        whole = _load_file(folder / tag)
        now.model.load_state_dict(whole if translate_function is None else translate_function(whole), strict)
        kept, content = folder / f"optimizer_{tag}", folder / f"user_content_{tag}"
    if optimizer is not None and kept.exists():
        optimizer.load_state_dict(_load_file(kept))
    return _load_file(content) if content.exists() else None


def _check_same_degree(source: Path, now: SmpState) -> None:
    files = len(list(source.glob("model_*.pt")))
    if not files:
        raise FileNotFoundError(f"{source} has no file model_*.pt: it is no partial checkpoint with a model")
    if files != now.grid.ranks:
        raise ValueError(
            f"{source} was saved with pipeline_parallel_degree {files}, which is {now.grid.ranks} here: a partial "
            "checkpoint fits its own only; save with partial=False to go on with another"
        )


def _load_file(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=False)


def _save_atomically(obj: Any, path: Path, **options: Any) -> None:
    """Write a file whole or not at all: under another name first."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    torch.save(obj, temporary, **options)
    temporary.replace(path)


def _write_text(text: str, path: Path) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    temporary.replace(path)
