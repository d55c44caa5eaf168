"""Packs the agent into the one file that is mounted into every training pod.

`python -m everstep.agent_zip agent.pyz` writes it; the operator calls `build_zipapp` and puts the bytes into a
ConfigMap. The same sources give the same bytes, so that the ConfigMap's name can be their digest.
"""

from __future__ import annotations

import hashlib
import io
import sys
import zipfile
from functools import cache
from pathlib import Path

_SOURCE = Path(__file__).parent / "agent"


@cache
def build_zipapp() -> bytes:
    """Return the bytes of the zipapp. It is stored, not compressed: an image's Python may lack zlib, and a ConfigMap
    has the room."""
    files = {"everstep/__init__.py": b""}
    for path in _SOURCE.rglob("*.py"):
        name = path.relative_to(_SOURCE).as_posix()
        files["__main__.py" if name == "__main__.py" else f"everstep/agent/{name}"] = path.read_bytes()
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as archive:
        for name in sorted(files):
            archive.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), files[name])
    return target.getvalue()


def compute_digest() -> str:
    """Return 12 hexadecimal digits that name these bytes."""
    return hashlib.sha256(build_zipapp()).hexdigest()[:12]


if __name__ == "__main__":
    Path(sys.argv[1]).write_bytes(build_zipapp())
