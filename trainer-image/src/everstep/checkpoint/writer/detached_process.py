"""A child process that outlives the process that has started it."""

from __future__ import annotations

import subprocess


class DetachedProcess(subprocess.Popen[bytes]):
    """A child that nobody has to wait for: it is let go without a ResourceWarning, which scripts may make an error."""

    def __del__(self) -> None:
        # As Popen's own, which has the child reaped later on. Nothing public keeps it from warning of one that runs.
        super().__del__(_warn=lambda *said, **more: None)  # type: ignore[call-arg]
