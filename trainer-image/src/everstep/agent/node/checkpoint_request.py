"""The file by which ranks learn that a checkpoint is asked for; its path is `EVERSTEP_CHECKPOINT_REQUEST`.

Programs of any language can look for it: it is there or not, appears whole, and goes when the ranks are told to stop.
`{"id": "…", "deadline": 1760000000.0}`; `deadline` is in Unix seconds by this machine's clock, or null.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path

from everstep.agent.system.agent_log import log_line
from everstep.agent.system.faults import explain_fault
from everstep.agent.wire.checkpoint_request import CheckpointRequest

from .fencing import READABLE


class CheckpointRequestFile:
    """The request file of one node, which all of its ranks read."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, request: CheckpointRequest) -> None:
        """Replace the request. Where that is impossible, as on a full disk, ranks go on without it."""
        deadline = None if request.seconds is None else round(time.time() + request.seconds, 3)
        fresh = self._path.with_name(self._path.name + ".new")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            fresh.write_text(json.dumps({"id": request.id, "deadline": deadline}))
            fresh.chmod(READABLE)
            os.replace(fresh, self._path)  # noqa: PTH105 - atomic: a reader sees no request, or all of it
        except OSError as error:
            log_line(f"the request for a checkpoint does not reach the ranks: {explain_fault(error)}")

    def clear(self) -> None:
        """Remove the request of an earlier generation."""
        with contextlib.suppress(OSError):
            self._path.unlink()
