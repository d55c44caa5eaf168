"""`smp.save`, `smp.load`, `smp.save_checkpoint` and `smp.resume_from_checkpoint`, with the documented file tree."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from everstep.compat.smdistributed.modelparallel.torch.optimizer import sharded
from everstep.compat.smdistributed.modelparallel.torch.ranks import dp_rank, mp_rank, rank, rdp_rank
from everstep.compat.smdistributed.modelparallel.torch.state import State, state

NEWEST = "newest"


def save(obj: Any, f: Any, partial: bool = True, **options: Any) -> None:
    """As torch.save; `partial`: a file of its own for each process of the model, `f` with `_<mp_rank>` behind.

    A script calls it where smp.dp_rank() is 0.
    """
    _write(obj, Path(f"{f}_{mp_rank()}" if partial else f), **options)


def load(f: Any, map_location: Any = None, partial: bool = True, **options: Any) -> Any:
    """As torch.load, of what smp.save has written; all processes call it."""
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
    **options: Any,
) -> None:
    """All processes call it. `partial`: files of each process under `<tag>_partial`, with the partition; else `<tag>`
    has the whole model's state dictionary, and `optimizer_<tag>` the whole optimizer's.

    `newest` names it once all files are there. Of partial ones the newest `num_kept_partial_checkpoints` stay.
    """
    now, folder = state(), Path(path)
    model = now.model if model is None else model
    if partial:
        _save_partial(now, folder / f"{tag}_partial", model, optimizer, user_content)
    else:
        whole = None if model is None else model.state_dict()
        whole_optimizer = None if optimizer is None else optimizer.state_dict()
        if rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
            _write(whole, folder / tag)
            if whole_optimizer is not None:
                _write(whole_optimizer, folder / f"optimizer_{tag}")
            if user_content is not None:
                _write(user_content, folder / f"user_content_{tag}")
    dist.barrier()
    if rank() == 0:
        _write_text(tag, folder / NEWEST)
        if partial and num_kept_partial_checkpoints is not None:
            found = sorted(folder.glob("*_partial"), key=lambda each: each.stat().st_mtime_ns)
            for old in found[: max(0, len(found) - num_kept_partial_checkpoints)]:
                shutil.rmtree(old)
    dist.barrier()


def _save_partial(now: State, folder: Path, model: Any, optimizer: Any, user_content: Any) -> None:
    if dp_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        if model is not None:
            _write({"model": model.local_state_dict(), "partition": model.stage_of}, folder / f"model_{mp_rank()}.pt")
        if now.config.half and model is not None:
            _write(model.engine_state(), folder / f"fp16_states_{mp_rank()}.pt")
    if rank() == 0:
        _write(user_content, folder / "user_content.pt")
    if optimizer is not None and (dp_rank() == 0 or sharded()):
        folder.mkdir(parents=True, exist_ok=True)
        _write(optimizer.local_state_dict(), folder / _optimizer_file())


def _optimizer_file() -> str:
    """Of this process, or of all replicas of its stage."""
    return f"optimizer_{mp_rank()}_{rdp_rank()}.pt" if sharded() else f"optimizer_{mp_rank()}.pt"


def resume_from_checkpoint(
    path: Any,
    tag: str | None = None,
    partial: bool = True,
    strict: bool = True,
    load_optimizer: bool = True,
    **options: Any,
) -> Any:
    """Loads into the model and the optimizer of the script, before the first step; gives the user content.

    `tag`: None for the newest. A partial one brings its partition, which then cannot be another. FileNotFoundError if
    there is none.
    """
    now, folder = state(), Path(path)
    if now.model is None:
        raise RuntimeError("smp.DistributedModel must wrap the model before a checkpoint is loaded")
    tag = (folder / NEWEST).read_text().strip() if tag is None else tag
    optimizer = now.optimizers[0] if load_optimizer and now.optimizers else None
    if partial:
        source = folder / f"{tag}_partial"
        found = _read(source / f"model_{mp_rank()}.pt")
        now.model.decide(found["partition"])
        now.model.load_state_dict(found["model"], strict)
        if (states := source / f"fp16_states_{mp_rank()}.pt").exists():
            now.model.load_engine_state(_read(states))
        kept = source / _optimizer_file()
        content = source / "user_content.pt"
    else:
        now.model.load_state_dict(_read(folder / tag), strict)
        kept, content = folder / f"optimizer_{tag}", folder / f"user_content_{tag}"
    if optimizer is not None and kept.exists():
        optimizer.load_state_dict(_read(kept))
    return _read(content) if content.exists() else None


def _read(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=False)


def _write(obj: Any, path: Path, **options: Any) -> None:
    """Whole or not at all: under another name first."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    torch.save(obj, temporary, **options)
    temporary.replace(path)


def _write_text(text: str, path: Path) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    temporary.replace(path)
