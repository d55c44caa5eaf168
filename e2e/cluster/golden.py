"""Images, imported once for all nodes.

A "golden" containerd root holds every image, unpacked. A node's root has databases of its own, hard links to the blobs
and symbolic links to the unpacked layers: milliseconds and no disk for each node, whatever the images weigh. It works
because containerd never changes a layer in place. Node roots lie beside the golden root, since hard links need one file
system.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from e2e.cache import cache_dir
from e2e.cluster import layers, node_config, oci, packages
from e2e.cluster.binaries import binary
from e2e.cluster.errors import ClusterError
from e2e.cluster.layers import UnpackedImage
from e2e.cluster.state import exclusive, write_atomically
from e2e.cluster.waiting import until

LOCK = "golden"
BLOBS = Path("io.containerd.content.v1.content/blobs/sha256")
SNAPSHOTS = Path("io.containerd.snapshotter.v1.overlayfs/snapshots")
DATABASES = (
    Path("io.containerd.metadata.v1.bolt/meta.db"),
    Path("io.containerd.snapshotter.v1.overlayfs/metadata.db"),
)
# Names that no pod asks for: of an image on its way in, and of one whose name went to newer content.
IMPORTED = "import.everstep.dev/image"
STALE = "stale.everstep.dev/image"
# containerd's own second name of every image, by the digest of its configuration; it holds the image as well.
OF_CRI = "sha256:"


def root() -> Path:
    return cache_dir() / "containerd" / "golden"


def node_root(node: str) -> Path:
    return cache_dir() / "containerd" / node


def _record() -> Path:
    return cache_dir() / "containerd" / "golden.json"


def images() -> dict[str, str]:
    """Return the images in the golden root: name -> key of the content."""
    try:
        held: dict[str, str] = json.loads(_record().read_text())
    except FileNotFoundError:
        return {}
    return held


def holds(name: str, key: str) -> bool:
    """Return whether an image of that name and key is there, so that its archive need not be built again."""
    return images().get(name) == key


def ensure(archives: Mapping[str, Path], keys: Mapping[str, str] | None = None) -> list[str]:
    """Import image archives (OCI or Docker); returns the names of those that were new.

    ``archives`` maps the name that pods use, such as ``everstep/trainer:0.1.0``, to its archive. ``keys`` names the
    content in the caller's own terms (a hash of the build's inputs); by default it is read from the archive. An archive
    may be deleted afterwards, and may be missing when the golden root holds its name already.
    """
    keys = keys or {}
    with exclusive(LOCK):
        held = images()
        new: dict[str, str] = {}
        for name, archive in archives.items():
            if name in held and name not in keys and not archive.exists():
                continue
            key = keys.get(name) or oci.content_key(archive)
            if held.get(name) != key:
                if not archive.exists():
                    raise ClusterError(f"image {name}: there is no archive {archive}")
                new[name] = key
        _add(new, lambda ctr, name: import_archive(ctr, name, archives[name]))
    return list(new)


def ensure_linked(unpacked: Mapping[str, UnpackedImage], keys: Mapping[str, str]) -> list[str]:
    """Take images over from a builder's store by links, without a copy; returns the names of those that were new.

    Args:
        unpacked: The images by the name that pods use; their layers must lie on the golden root's file system.
        keys: The content of each, in the caller's own terms.
    """
    with exclusive(LOCK):
        held = images()
        new = {name: keys[name] for name in unpacked if held.get(name) != keys[name]}
        _add(new, lambda ctr, name: link_image(ctr, name, unpacked[name]))
    return list(new)


def _add(new: Mapping[str, str], take: Callable[[list[str], str], None]) -> None:
    """Let ``take`` bring in each of the images ``new``, name -> key, and record it."""
    if not new:
        return
    held = images()
    with _containerd() as socket:
        ctr = ["ctr", "--address", str(socket)]
        _remove_stale(ctr)
        for name, key in new.items():
            print(f"importing {name} ...", flush=True)
            take(ctr, name)
            held[name] = key
            write_atomically(_record(), json.dumps(held, indent=1))


def ensure_pause() -> None:
    """The image in which every pod's sandbox runs."""
    program = binary("pause")
    archive = cache_dir() / "pause.tar"
    oci.write_archive(archive, node_config.PAUSE_IMAGE, {"pause": program.read_bytes()}, ["/pause"])
    ensure({node_config.PAUSE_IMAGE: archive})


@contextmanager
def unpacked(name: str) -> Iterator[UnpackedImage]:
    """Provide an image of the golden root, which stays there for the time of the block."""
    with exclusive(LOCK):
        with _containerd() as socket:
            command = ["ctr", "--address", str(socket), "--namespace", "k8s.io"]
            found = layers.find(command, _listed([*command, "images"])[reference(name)])
        yield found


def seed(target: Path) -> dict[str, str]:
    """Make ``target`` a containerd root with all golden images; returns which: name -> key."""
    with exclusive(LOCK):
        shutil.rmtree(target, ignore_errors=True)
        for folder in (BLOBS, SNAPSHOTS):
            (target / folder).mkdir(parents=True)
        for blob in (root() / BLOBS).iterdir():
            (target / BLOBS / blob.name).hardlink_to(blob)
        for layer in (root() / SNAPSHOTS).iterdir():
            (target / SNAPSHOTS / layer.name).symlink_to(layer)
        for database in DATABASES:
            (target / database).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root() / database, target / database)
        return images()


def reference(name: str) -> str:
    """Return the full name under which a container runtime looks an image up."""
    first, slash, _ = name.partition("/")
    if not slash:
        name = f"docker.io/library/{name}"
    elif not ("." in first or ":" in first or first == "localhost"):
        name = f"docker.io/{name}"
    return name if ":" in name.rpartition("/")[2] or "@" in name else f"{name}:latest"


def import_archive(ctr: list[str], name: str, archive: Path) -> None:
    """Import an archive through a ``ctr`` command line, whatever name the archive itself gives to the image."""
    command = [*ctr, "--namespace", "k8s.io", "images"]
    wanted = reference(name)
    before = _listed(command).get(wanted)
    if before is not None:
        # Nodes may still run on the layers of the image that loses its name now.
        _run(*command, "tag", "--force", wanted, f"{STALE}:{before.removeprefix('sha256:')}")
    _run(*command, "import", "--digests", "--base-name", IMPORTED, str(archive))
    imported = [found for found in _listed(command) if found.startswith(IMPORTED)]
    if imported:
        _run(*command, "tag", "--force", imported[0], wanted)
        _run(*command, "remove", *imported)
    elif wanted not in _listed(command):
        raise ClusterError(f"{archive} was imported, but under another name than {wanted}")


def link_image(ctr: list[str], name: str, image: UnpackedImage) -> None:
    """Take an image over by links, through a ``ctr`` command line."""
    command = [*ctr, "--namespace", "k8s.io"]
    with tempfile.TemporaryDirectory(prefix="everstep-link-", dir=cache_dir()) as folder:
        archive = Path(folder) / "image.tar"
        layers.link(command, image, archive, reference(name))
        import_archive(ctr, name, archive)
    layers.release(command, image)


def _remove_stale(ctr: list[str]) -> None:
    """Free the disk of replaced images, once no node is left that could use them."""
    if any(root().parent.glob("node-*")):
        return
    command = [*ctr, "--namespace", "k8s.io", "images"]
    listed = _listed(command)
    kept = {digest for name, digest in listed.items() if not name.startswith((STALE, OF_CRI))}
    # An image that became current again keeps its own names.
    stale = [name for name, digest in listed.items() if name.startswith(STALE) or digest not in kept]
    if stale:
        _run(*command, "remove", "--sync", *stale)


def _listed(command: list[str]) -> dict[str, str]:
    """Images by name, with their digests."""
    rows = (line.split() for line in _run(*command, "list").splitlines()[1:])
    return {row[0]: row[2] for row in rows}


@contextmanager
def _containerd() -> Iterator[Path]:
    """Run a containerd on the golden root, for the time of an import, and give its socket."""
    packages.ensure(packages.NODES)
    root().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="everstep-golden-") as folder:
        state, socket = Path(folder) / "state", Path(folder) / "socket"
        configuration = Path(folder) / "containerd.toml"
        configuration.write_text(
            node_config.containerd(root(), Path(folder) / "cni", state=str(state), socket=str(socket))
        )
        # Namespaces of its own: killed in the middle of unpacking, it leaves no mount behind.
        command = ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child=TERM"]
        with (Path(folder) / "log").open("wb") as log:
            process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *command, "containerd", "--config", str(configuration)],
                stdout=log,
                stderr=log,
            )
        try:
            until(lambda: _answers(socket, process), "containerd of the golden images answers", 30)
            yield socket
        finally:
            _end(process)


def _answers(socket: Path, process: subprocess.Popen[bytes]) -> bool:
    if process.poll() is not None:
        raise ClusterError("containerd of the golden images ended at once")
    command = ["ctr", "--address", str(socket), "--connect-timeout", "1s", "version"]
    return socket.exists() and subprocess.run(command, capture_output=True, check=False).returncode == 0


def _end(process: subprocess.Popen[bytes]) -> None:
    """Let containerd close its databases; process 1 of a PID namespace gets only the signals that it handles."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    for child in children:
        subprocess.run(["kill", f"-{signal.SIGTERM.value}", child], check=False)
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _run(*command: str) -> str:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise ClusterError(f"{' '.join(command[:6])}: {result.stderr.strip()[-2000:]}")
    return result.stdout
