"""The two ways to build an image here: buildah, which needs no daemon, and Docker where its engine runs."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Protocol

from e2e.images.base import Base
from e2e.images.errors import ImageError
from e2e.images.tools import cache_dir, need, run

# On each image, since a name says nothing of the content: the same name with another key is how a change arrives.
KEY_LABEL = "everstep.dev/content-key"


@dataclass(frozen=True)
class Recipe:
    """One build: all that a Dockerfile is given."""

    name: str
    key: str
    dockerfile: Path
    context: Path
    base: str


class Engine(Protocol):
    """What the rest of this package asks of a build program."""

    def key(self, name: str) -> str | None:
        """The content key of the image that bears ``name``; None if there is none."""

    def base(self, base: Base) -> str:
        """The name under which a Dockerfile finds ``base``, which is made now if need be."""

    def build(self, recipe: Recipe) -> None:
        """Build an image and give it its name."""

    def write(self, name: str, archive: Path, known: Path | None) -> None:
        """Write an image to ``archive``, if possible without the blobs that the folder ``known`` holds."""

    def run(self, name: str, command: Sequence[str], mounts: Mapping[Path, str]) -> str:
        """Run ``command`` as the image's user with host folders mounted at the given paths; what it printed."""


class Docker:
    """A Docker engine. It takes the public base images, and writes whole archives only."""

    def key(self, name: str) -> str | None:
        template = f'--format={{{{index .Config.Labels "{KEY_LABEL}"}}}}'
        return _answer("docker", "image", "inspect", template, name)

    def base(self, base: Base) -> str:
        return base.public

    def build(self, recipe: Recipe) -> None:
        with _package_mirror() as secrets:
            run("docker", "build", "--network=host", *_options(recipe), *secrets, recipe.context)

    def write(self, name: str, archive: Path, known: Path | None) -> None:
        run("docker", "save", "--output", archive, name)

    def run(self, name: str, command: Sequence[str], mounts: Mapping[Path, str]) -> str:
        volumes = [f"--volume={host}:{path}" for host, path in mounts.items()]
        return run(
            "docker", "run", "--rm", "--network=host", *volumes, f"--entrypoint={command[0]}", name, *command[1:]
        )


class Buildah:
    """buildah, with its images below the cache folder and on overlay: vfs, its fallback, copies every layer."""

    def __init__(self) -> None:
        need("buildah")
        self._storage = cache_dir() / "containers" / "storage"
        self._state = cache_dir() / "containers" / "run"
        self._buildah = ("buildah", "--root", self._storage, "--runroot", self._state, "--storage-driver=overlay")

    def key(self, name: str) -> str | None:
        return self._inspect(name, f'index .OCIv1.Config.Labels "{KEY_LABEL}"')

    def base(self, base: Base) -> str:
        if self.key(base.name) != base.key:
            print(f"building {base.name} …", flush=True)
            with tempfile.TemporaryDirectory(dir=cache_dir()) as folder:
                base.write_rootfs(Path(folder))
                (Path(folder) / "Dockerfile").write_text('FROM scratch\nADD rootfs.tar /\nCMD ["bash"]\n')
                label = f"--label={KEY_LABEL}={base.key}"
                run(*self._buildah, "bud", "--isolation=chroot", label, "--tag", base.name, folder)
        return base.name

    def build(self, recipe: Recipe) -> None:
        # chroot: no user namespaces or runtime needed. Everything is trusted here, and runs as root anyway.
        how = ("--isolation=chroot", "--network=host", "--layers", "--force-rm")
        before = self._inspect(recipe.name, ".FromImageID")
        with _package_mirror() as secrets:
            run(*self._buildah, "bud", *how, *_options(recipe), *secrets, recipe.context)
        if before and before != self._inspect(recipe.name, ".FromImageID"):
            # Goes with the layers that only it has, unless a container or another image still needs it.
            with suppress(ImageError):
                run(*self._buildah, "rmi", before)

    def write(self, name: str, archive: Path, known: Path | None) -> None:
        """Write an OCI layout with uncompressed layers, whose digests are the same from one write to the next.

        So it can leave out what a containerd holds already, whose content store names its blobs in the same way:
        after a change of code, `ctr images import` reads a megabyte instead of six gigabytes.
        """
        need("skopeo")
        with tempfile.TemporaryDirectory(dir=archive.parent, prefix=".layout-") as folder:
            layout = Path(folder)
            blobs = layout / "blobs" / "sha256"
            blobs.mkdir(parents=True)
            for blob in known.iterdir() if known else ():
                (blobs / blob.name).symlink_to(blob)
            store = f"containers-storage:[overlay@{self._storage}+{self._state}]{name}"
            # skopeo, since `buildah push` compresses whatever goes to an OCI layout.
            run("skopeo", "copy", "--quiet", "--dest-oci-accept-uncompressed-layers", store, f"oci:{layout}:{name}")
            for blob in blobs.iterdir():
                if blob.is_symlink():
                    blob.unlink()
            # --remove-files: the disk need not hold every layer twice.
            run("tar", "--create", "--remove-files", "--file", archive, "--directory", layout, ".")

    def run(self, name: str, command: Sequence[str], mounts: Mapping[Path, str]) -> str:
        container = run(*self._buildah, "from", "--pull-never", name).strip()
        try:
            volumes = [f"--volume={host}:{path}" for host, path in mounts.items()]
            how = ("--isolation=chroot", "--network=host")
            return run(*self._buildah, "run", *how, *volumes, container, "--", *command)
        finally:
            run(*self._buildah, "rm", container)

    def _inspect(self, name: str, field: str) -> str | None:
        return _answer(*self._buildah, "inspect", "--type=image", f"--format={{{{{field}}}}}", name)


@cache
def engine() -> Engine:
    """Docker where its engine answers, else buildah."""
    if shutil.which("docker"):
        answer = subprocess.run(["docker", "info"], capture_output=True, check=False)
        if answer.returncode == 0:
            return Docker()
    return Buildah()


def _options(recipe: Recipe) -> list[str]:
    return [
        f"--file={recipe.dockerfile}",
        f"--tag={recipe.name}",
        f"--label={KEY_LABEL}={recipe.key}",
        f"--build-arg=BASE_IMAGE={recipe.base}",
    ]


def _answer(*command: str | Path) -> str | None:
    try:
        found = run(*command).strip()
    except ImageError:
        return None
    return found if found not in ("", "<no value>") else None


@contextmanager
def _package_mirror() -> Iterator[list[str]]:
    """This machine's own pip settings, as build secrets: a mirror or its certificate never becomes part of an image."""
    settings = {
        "index-url": os.environ.get("PIP_INDEX_URL"),
        "extra-index-url": os.environ.get("PIP_EXTRA_INDEX_URL"),
        "proxy": os.environ.get("PIP_PROXY"),
        "timeout": os.environ.get("PIP_DEFAULT_TIMEOUT"),
    }
    certificates = os.environ.get("PIP_CERT") or os.environ.get("SSL_CERT_FILE")
    if certificates:
        settings["cert"] = "/run/secrets/pip_cert"
    with tempfile.TemporaryDirectory() as folder:
        configuration = Path(folder) / "pip.conf"
        lines = [f"{name} = {value}" for name, value in settings.items() if value]
        configuration.write_text("\n".join(["[global]", *lines, ""]))
        secrets = [f"--secret=id=pip_conf,src={configuration}"]
        if certificates:
            secrets.append(f"--secret=id=pip_cert,src={certificates}")
        yield secrets
