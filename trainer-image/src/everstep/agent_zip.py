"""Packs the agent into the one file that is mounted into every training pod.

`python -m everstep.agent_zip agent.pyz [PYTHON…]` writes it, with byte code for this Python and those named; the
operator calls `build_zipapp` and puts the bytes into a ConfigMap. The ConfigMap's name is their digest, so one operator
must always give the same bytes. Byte code is not the same each time it is compiled: an image has its file from when it
was built, and without that file there are sources only.
"""

from __future__ import annotations

import hashlib
import io
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

_PACKAGE = Path(__file__).parent
_SOURCE = _PACKAGE / "agent"
PACKED = _PACKAGE / "agent.pyz"  # of an image
LIMIT = 1_000_000  # bytes; a ConfigMap takes 1 MiB of data
_COMPILE_SECONDS = 60.0

# Another Python runs this: it imports nothing of everstep. The modules come as a zipapp on stdin, and go back compiled,
# to be believed without a look at the sources, which lie elsewhere in the archive.
_COMPILER = """
import importlib._bootstrap_external as external, importlib.util, io, sys, zipfile
sources = zipfile.ZipFile(io.BytesIO(sys.stdin.buffer.read()))
target = io.BytesIO()
with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
    for name in sources.namelist():
        if name != "__main__.py":
            source = sources.read(name)
            code = compile(source, "agent.pyz/" + name, "exec", dont_inherit=True)
            pyc = external._code_to_hash_pyc(code, importlib.util.source_hash(source), False)
            archive.writestr(zipfile.ZipInfo("%s/%sc" % (importlib.util.MAGIC_NUMBER.hex(), name)), pyc)
sys.stdout.buffer.write(target.getvalue())
"""


@cache
def build_zipapp() -> bytes:
    """Return the bytes of the zipapp: those of the image's file, or of the sources if there is none or it is older."""
    sources = pack_sources()
    if PACKED.exists():
        packed = PACKED.read_bytes()
        if read_sources(packed) == read_sources(sources):
            return packed
    return sources


def pack_sources() -> bytes:
    """Return a zipapp of the sources. They are compressed, as each pod's kubelet reads the ConfigMap; what any Python
    must be able to read is not."""
    files = {"everstep/__init__.py": b""}
    for path in _SOURCE.rglob("*.py"):
        name = path.relative_to(_SOURCE).as_posix()
        files["__main__.py" if name == "__main__.py" else f"everstep/agent/{name}"] = path.read_bytes()
    return _write(files)


def pack_byte_code(pythons: Iterable[str]) -> bytes:
    """Return the zipapp with byte code beside its sources. An agent then starts in six tenths of the processor time.

    Args:
        pythons: The interpreters to compile for; one of a version that was there before adds nothing.

    Raises:
        ValueError: A ConfigMap would not hold it.
        subprocess.SubprocessError: An interpreter does not compile it.
    """
    sources = pack_sources()
    compiled: dict[str, bytes] = {}
    for python in pythons:
        done = subprocess.run(
            [python, "-I", "-c", _COMPILER], input=sources, stdout=subprocess.PIPE, timeout=_COMPILE_SECONDS, check=True
        )
        with zipfile.ZipFile(io.BytesIO(done.stdout)) as archive:
            compiled.update({name: archive.read(name) for name in archive.namelist()})
    packed = _write(compiled, sources)
    if len(packed) > LIMIT:
        raise ValueError(f"the agent with its byte code has {len(packed)} bytes, {LIMIT} at most: name fewer Pythons")
    return packed


def read_sources(zipapp: bytes) -> dict[str, bytes]:
    """Return the sources in a zipapp by their names."""
    with zipfile.ZipFile(io.BytesIO(zipapp)) as archive:
        return {name: archive.read(name) for name in archive.namelist() if name.endswith(".py")}


def compute_digest() -> str:
    """Return 12 hexadecimal digits that name these bytes."""
    return hashlib.sha256(build_zipapp()).hexdigest()[:12]


def _write(files: Mapping[str, bytes], begun: bytes = b"") -> bytes:
    target = io.BytesIO(begun)
    with zipfile.ZipFile(target, "a" if begun else "w") as archive:
        for name in sorted(files):
            way = zipfile.ZIP_STORED if name == "__main__.py" else zipfile.ZIP_DEFLATED
            archive.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), files[name], way, compresslevel=9)
    return target.getvalue()


if __name__ == "__main__":
    Path(sys.argv[1]).write_bytes(pack_byte_code([sys.executable, *sys.argv[2:]]))
