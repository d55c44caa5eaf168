"""Base images made from a distribution's packages, for machines that reach no image registry.

They stand in for ``debian:bookworm-slim`` and ``ubuntu:20.04``: the same packages, with Python added.
"""

from __future__ import annotations

import hashlib
import tempfile
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

from e2e.images.errors import ImageError
from e2e.images.tools import need, run

# What the distributions' own slim images leave out.
_SLIM = (
    "--dpkgopt=path-exclude=/usr/share/man/*",
    "--dpkgopt=path-exclude=/usr/share/locale/*",
    "--dpkgopt=path-exclude=/usr/share/doc/*",
    "--dpkgopt=path-include=/usr/share/doc/*/copyright",
)


@dataclass(frozen=True)
class Keyring:
    """The package with a foreign distribution's signing keys; fixed by its hash, since nothing else vouches for it."""

    url: str
    sha256: str
    path: str

    def fetch(self, folder: Path) -> Path:
        """Unpack the keyring into ``folder``."""
        with urllib.request.urlopen(self.url, timeout=60) as response:
            package = response.read()
        found = hashlib.sha256(package).hexdigest()
        if found != self.sha256:
            raise ImageError(f"{self.url} has the SHA-256 {found}, not {self.sha256}")
        archive = folder / "keyring.deb"
        archive.write_bytes(package)
        run("dpkg-deb", "--extract", archive, folder)
        return folder / self.path


@dataclass(frozen=True)
class Base:
    """A base image: where its packages come from, and the public image that it stands in for."""

    name: str
    public: str
    suite: str
    mirror: str
    packages: tuple[str, ...] = ("python3",)
    options: tuple[str, ...] = field(default=_SLIM, repr=False)
    keyring: Keyring | None = None

    @property
    def key(self) -> str:
        """Changes with the recipe only: a newer point release of the same suite is no reason to build everything."""
        return hashlib.sha256(repr(self).encode() + repr(self.options).encode()).hexdigest()[:16]

    def write_rootfs(self, folder: Path) -> None:
        """Write the root file system to ``folder/rootfs.tar``."""
        need("mmdebstrap")
        with tempfile.TemporaryDirectory() as readable:
            # apt checks signatures as a user of its own, who cannot look into folders of root.
            Path(readable).chmod(0o755)
            signed = f"[signed-by={self.keyring.fetch(Path(readable))}] " if self.keyring else ""
            mirrors = [f"deb {signed}{self.mirror} {self.suite} main"]
            if self.keyring is None:
                mirrors.append(f"deb {self.mirror} {self.suite}-updates main")
                mirrors.append(f"deb {self.mirror}-security {self.suite}-security main")
            how = ("--quiet", "--variant=minbase", f"--include={','.join(self.packages)}", *self.options)
            run("mmdebstrap", *how, self.suite, folder / "rootfs.tar", *mirrors)


BOOKWORM = Base(
    name="localhost/everstep-base:bookworm",
    public="docker.io/library/debian:bookworm-slim",
    suite="bookworm",
    mirror="http://deb.debian.org/debian",
)

# The newest suite of either distribution, still on its mirrors, whose Python is too old for the agent.
FOCAL = Base(
    name="localhost/everstep-base:focal",
    public="docker.io/library/ubuntu:20.04",
    suite="focal",
    mirror="http://archive.ubuntu.com/ubuntu",
    options=(),  # its packages fail to install without their man pages
    keyring=Keyring(
        url="http://archive.ubuntu.com/ubuntu/pool/main/u/ubuntu-keyring/ubuntu-keyring_2021.03.26_all.deb",
        sha256="0d0e7ed6b112f5d03eabf3c7eb01ebdacf9c57714b279e90495cfc58c8c4520f",
        path="usr/share/keyrings/ubuntu-archive-keyring.gpg",
    ),
)
