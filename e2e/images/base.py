"""Base images made from a distribution's packages, for machines that reach no image registry.

They stand in for ``debian:bookworm-slim``: the same packages, with Python added.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path

from e2e.images.tools import need, run

# What the distributions' own slim images leave out.
_SLIM = (
    "--dpkgopt=path-exclude=/usr/share/man/*",
    "--dpkgopt=path-exclude=/usr/share/locale/*",
    "--dpkgopt=path-exclude=/usr/share/doc/*",
    "--dpkgopt=path-include=/usr/share/doc/*/copyright",
)


@dataclass(frozen=True)
class Base:
    """A base image: where its packages come from, and the public image that it stands in for."""

    name: str
    public: str
    suite: str
    mirror: str
    packages: tuple[str, ...] = ("python3",)
    options: tuple[str, ...] = field(default=_SLIM, repr=False)

    @property
    def key(self) -> str:
        """Changes with the recipe only: a newer point release of the same suite is no reason to build everything."""
        return hashlib.sha256(repr(self).encode() + repr(self.options).encode()).hexdigest()[:16]

    def write_rootfs(self, folder: Path) -> None:
        """Write the root file system to ``folder/rootfs.tar``."""
        need("mmdebstrap")
        mirrors = [
            f"deb {self.mirror} {self.suite} main",
            f"deb {self.mirror} {self.suite}-updates main",
            f"deb {self.mirror}-security {self.suite}-security main",
        ]
        how = ("--quiet", "--variant=minbase", f"--include={','.join(self.packages)}", *self.options)
        run("mmdebstrap", *how, self.suite, folder / "rootfs.tar", *mirrors)


BOOKWORM = Base(
    name="localhost/everstep-base:bookworm",
    public="docker.io/library/debian:bookworm-slim",
    suite="bookworm",
    mirror="http://deb.debian.org/debian",
)
