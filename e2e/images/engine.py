"""The two ways to build an image here: buildah, which needs no daemon, and Docker where its engine runs."""

from __future__ import annotations

import base64
import json
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

from e2e.cache import cache_dir
from e2e.images.base import Base
from e2e.images.errors import ImageError
from e2e.images.tools import need, run

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
    target: str = ""


class ImageBuilder(Protocol):
    """A build program, as the rest of this package needs it."""

    def key(self, name: str) -> str | None:
        """Return the content key of the image that bears ``name``; None if there is none."""

    def base(self, base: Base) -> str:
        """Return the name under which a Dockerfile finds ``base``, which is made now if need be."""

    def build(self, recipe: Recipe) -> None:
        """Build an image and give it its name."""

    def write(self, name: str, archive: Path) -> None:
        """Write an image to ``archive``."""

    def size(self, name: str) -> int:
        """Return the bytes of an image's layers, uncompressed."""

    def layers(self, name: str) -> tuple[bytes, tuple[Path, ...]] | None:
        """Return an image's configuration and the folders of its layers, the lowest first; None where they are not at
        hand."""

    def run(self, name: str, command: Sequence[str], mounts: Mapping[Path, str]) -> str:
        """Run ``command`` as the image's user with host folders mounted at the given paths; what it printed."""


class Docker:
    """A Docker engine. It takes the public base images, and keeps its layers to itself."""

    def key(self, name: str) -> str | None:
        template = f'--format={{{{index .Config.Labels "{KEY_LABEL}"}}}}'
        return _answer("docker", "image", "inspect", template, name)

    def base(self, base: Base) -> str:
        return base.public

    def build(self, recipe: Recipe) -> None:
        with _package_mirror() as secrets:
            run("docker", "build", "--network=host", *_options(recipe), *secrets, recipe.context)

    def write(self, name: str, archive: Path) -> None:
        run("docker", "save", "--output", archive, name)

    def size(self, name: str) -> int:
        return int(run("docker", "image", "inspect", "--format={{.Size}}", name))

    def layers(self, name: str) -> None:
        return None

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

    def write(self, name: str, archive: Path) -> None:
        run(*self._buildah, "push", "--quiet", name, f"oci-archive:{archive}:{name}")

    def size(self, name: str) -> int:
        _, folders = self.layers(name)
        return sum(path.lstat().st_size for folder in folders for path in folder.rglob("*") if not path.is_dir())

    def layers(self, name: str) -> tuple[bytes, tuple[Path, ...]]:
        """Read them from the store's own records, as containers/storage writes them."""
        images = json.loads((self._storage / "overlay-images" / "images.json").read_text())
        parents = {
            layer["id"]: layer.get("parent")
            for layer in json.loads((self._storage / "overlay-layers" / "layers.json").read_text())
        }
        (image,) = (each for each in images if name in each.get("names", ()))
        file = base64.b64encode(f"sha256:{image['id']}".encode()).decode()
        config = (self._storage / "overlay-images" / image["id"] / f"={file}").read_bytes()
        folders: list[Path] = []
        layer = image["layer"]
        while layer:
            folders.insert(0, self._storage / "overlay" / layer / "diff")
            layer = parents[layer]
        return config, tuple(folders)

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


def is_present() -> bool:
    """Return whether there is an engine to ask: one that must be installed first has no images."""
    return shutil.which("buildah") is not None or shutil.which("docker") is not None


def missing_tools() -> list[str]:
    """Return the Debian packages that building images here would install."""
    return [] if shutil.which("docker") else [name for name in ("buildah", "mmdebstrap") if not shutil.which(name)]


@cache
def engine() -> ImageBuilder:
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
        *([f"--target={recipe.target}"] if recipe.target else []),
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
