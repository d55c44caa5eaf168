"""The catalogue of images, and what enters each.

An image is known by its content key: a hash over its Dockerfile, the files which that copies, and its base. Two
checkouts with the same sources share one image; a change of a source file is a new key and nothing else is.
"""

from __future__ import annotations

import fcntl
import hashlib
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from e2e.cache import cache_dir
from e2e.images import old_python
from e2e.images.base import BOOKWORM, Base
from e2e.images.engine import Recipe, engine
from e2e.images.errors import ImageError

REPOSITORY = Path(__file__).parents[2]

FORGOTTEN_SECONDS = 1800.0

# COPY with its options and paths; a source of another stage is no file of ours.
_COPY = re.compile(r"^COPY\s+(?!--from)((?:--\S+\s+)*)(.+)\s+\S+$", re.MULTILINE)


@dataclass(frozen=True)
class Image:
    """An image: the name that jobs use, its Dockerfile in the repository, which is the context, and its base."""

    name: str
    dockerfile: str
    base: Base | Image = BOOKWORM
    # The stage of the Dockerfile; empty for the last one.
    target: str = ""

    @property
    def short_name(self) -> str:
        """Such as ``trainer``."""
        return self.name.rpartition("/")[2].partition(":")[0]

    @property
    def key(self) -> str:
        """Return the content key, read from the files as they are now."""
        digest = hashlib.sha256(f"{self.name}\0{self.base.key}\0{self.target}\0".encode())
        for path in (REPOSITORY / self.dockerfile, *self.inputs()):
            # git keeps the executable bit and no other; so does this.
            executable = bool(path.stat().st_mode & 0o100)
            content = path.read_bytes()
            digest.update(f"{path.relative_to(REPOSITORY)}\0{executable}\0{len(content)}\0".encode())
            digest.update(content)
        return digest.hexdigest()[:16]

    def inputs(self) -> list[Path]:
        """Return the files that the Dockerfile copies. They are read from it: a list beside it would one day be out of
        step."""
        found: set[Path] = set()
        for _, sources in _COPY.findall((REPOSITORY / self.dockerfile).read_text()):
            for source in sources.split():
                path = REPOSITORY / source
                if not path.exists():
                    raise ImageError(f"{self.dockerfile} copies {source}, which does not exist")
                found.update(_files(path) if path.is_dir() else [path])
        return sorted(found)

    @property
    def built(self) -> bool:
        """Return whether the image exists with the content that its files have now."""
        return engine().key(self.name) == self.key

    @property
    def size(self) -> int:
        """Return the bytes of all its files, uncompressed, as a node stores them."""
        self.build()
        return engine().size(self.name)

    @property
    def exists(self) -> bool:
        """Return whether some content has been built before: the next build is then likely one of small layers only."""
        return engine().key(self.name) is not None

    def build(self) -> None:
        """Build the image unless one with this key exists."""
        key = self.key
        if isinstance(self.base, Image):
            self.base.build()
        with _locked(self.name):
            if engine().key(self.name) == key:
                return
            print(f"building {self.name} ({key}) …", flush=True)
            started = time.monotonic()
            base = self.base.name if isinstance(self.base, Image) else _base(self.base)
            engine().build(Recipe(self.name, key, REPOSITORY / self.dockerfile, REPOSITORY, base, self.target))
            print(f"built {self.name} in {time.monotonic() - started:.0f} s", flush=True)

    def run(self, *command: str, mounts: Mapping[Path, str] | None = None) -> str:
        """Run ``command`` in a container of the image, on this machine and its network; what it printed."""
        self.build()
        return engine().run(self.name, command, mounts or {})

    @contextmanager
    def layers(self) -> Iterator[tuple[bytes, tuple[Path, ...]] | None]:
        """Provide the image's configuration and the folders of its layers, which stay for the time of the block.

        None where the engine does not say where they are: then ``archive`` is the way.
        """
        self.build()
        with _locked(self.name):
            yield engine().layers(self.name)

    def archive(self) -> Path:
        """Return an archive of the image for ``ctr images import`` or ``docker load``; whoever imports it deletes
        it."""
        self.build()
        stem = self.name.rpartition("/")[2].replace(":", "-")
        target = cache_dir() / "images" / f"{stem}-{self.key}.tar"
        with _locked(self.name):
            _remove_forgotten(target.parent, stem)
            unfinished = target.with_suffix(".unfinished")
            engine().write(self.name, unfinished)
            unfinished.rename(target)
        return target


def images() -> list[Image]:
    """Return all images, those of the project first."""
    operator = Image("docker.io/everstep/operator:0.1.0", "operator/Dockerfile")
    found = [
        operator,
        Image("docker.io/everstep/trainer:0.1.0", "trainer-image/Dockerfile", target="trainer"),
        Image("docker.io/everstep/trainer-horovod:0.1.0", "trainer-image/Dockerfile", target="trainer-horovod"),
        Image("docker.io/everstep/byo:test", "e2e/images/byo/Dockerfile"),
        Image("docker.io/everstep/distroless:test", "e2e/images/distroless/Dockerfile"),
        Image("docker.io/everstep/python-minimal:test", "e2e/images/python-minimal/Dockerfile"),
        Image("docker.io/everstep/root:test", "e2e/images/root/Dockerfile"),
        Image("docker.io/everstep/operator:next", "e2e/images/operator-next/Dockerfile", operator),
    ]
    if old_python.available():
        found.append(Image("docker.io/everstep/python38:test", "e2e/images/python38/Dockerfile"))
    return found


def image(short_name: str) -> Image:
    """Return the image called, for instance, ``trainer``, ``trainer:0.1.0`` or ``docker.io/everstep/trainer:0.1.0``."""
    for candidate in images():
        last = candidate.name.rpartition("/")[2]
        if short_name in (candidate.name, last, last.partition(":")[0]):
            return candidate
    raise ImageError(f"there is no image {short_name}; there are {', '.join(each.name for each in images())}")


def _remove_forgotten(folder: Path, stem: str) -> None:
    """Delete archives whose importer was killed before it could; the trainer's have six gigabytes each."""
    for archive in folder.glob(f"{stem}-*.tar"):
        if archive.stat().st_mtime < time.time() - FORGOTTEN_SECONDS:
            archive.unlink(missing_ok=True)


def _base(base: Base) -> str:
    """Build a base, once: two images may need the same one at the same time."""
    with _locked(base.name):
        return engine().base(base)


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]


@contextmanager
def _locked(name: str) -> Iterator[None]:
    """Build an image in one process at a time, whichever asks for it."""
    folder = cache_dir() / "images"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f".{hashlib.sha256(name.encode()).hexdigest()[:16]}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
