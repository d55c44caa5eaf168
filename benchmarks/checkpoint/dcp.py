"""torch.distributed.checkpoint's asynchronous saves, each with a stager that keeps its buffers."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save


class Dcp:
    """One mode; a process group of one rank is needed, and made."""

    def __init__(self, objects: dict[str, Any], folder: Path, mode: str) -> None:
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        self._objects = objects
        self._folder = folder
        self._mode = AsyncCheckpointerType(mode)
        # Buffers are kept from save to save, in memory that a process can share: its fastest way without a GPU.
        self._stager = DefaultStager(StagingOptions(False, True, False, False))

    def stall(self) -> float:
        """Save, and return the seconds until training may go on, once the checkpoint is there."""
        began = time.perf_counter()
        model, optimizer = get_state_dict(self._objects["model"], self._objects["optimizer"])
        saving: Any = async_save(
            {"model": model, "optimizer": optimizer},
            checkpoint_id=str(self._folder),
            async_checkpointer_type=self._mode,
            async_stager=self._stager,
        )
        took = time.perf_counter() - began
        getattr(saving, "upload_completion", saving).result()
        shutil.rmtree(self._folder)
        return took

    def close(self) -> None:
        self._stager.close()
