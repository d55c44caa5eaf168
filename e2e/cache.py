"""The folder in which what is built once is kept for later runs: programs, images, the file systems of nodes."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """Return ``$EVERSTEP_CACHE``, by default ``~/.cache/everstep``; it may not exist yet."""
    return Path(os.environ.get("EVERSTEP_CACHE") or Path.home() / ".cache" / "everstep")
