"""A manifest's command on a machine that is not its image: what the paths and the interpreter become there."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from everstep.cli.errors import CliError

PYTHONS = ("python", "python3")


@dataclass(frozen=True)
class PathMapping:
    """A folder of the image and the one that stands for it here: `--map /opt/everstep/examples=examples`."""

    inside: PurePosixPath
    outside: Path

    @classmethod
    def parse(cls, text: str) -> PathMapping:
        inside, equals, outside = text.partition("=")
        if not equals or not inside.startswith("/") or not outside:
            raise CliError(
                f"--map {text}: write it like --map /opt/code=src (a folder of the image = a folder here)", 2
            )
        folder = Path(outside).absolute()
        if not folder.exists():
            raise CliError(f"--map {text}: the folder {folder} does not exist", 2)
        return cls(PurePosixPath(inside), folder)

    def apply(self, path: PurePosixPath) -> Path | None:
        return self.outside / path.relative_to(self.inside) if path.is_relative_to(self.inside) else None


@dataclass(frozen=True)
class HostCommand:
    """A command for this machine. `changed` lists what was replaced: (as written, as run)."""

    argv: tuple[str, ...]
    changed: tuple[tuple[str, str], ...]


def adapt_command(
    command: Sequence[str], beside: Path, mappings: Sequence[PathMapping] = (), python: str | None = None
) -> HostCommand:
    """Return the command as it can run here.

    A path that does not exist here is looked for first under the mappings, then by its file name in the folder
    `beside`.

    Args:
        command: The command of the manifest.
        beside: The manifest's own folder: an example's script lies beside its manifest.
        mappings: Folders of the image and what stands for them here.
        python: The interpreter; by default what a shell would find, else the one that runs everstep.

    Raises:
        CliError: A program is not here.
    """
    argv: list[str] = []
    changed: list[tuple[str, str]] = []
    for position, word in enumerate(command):
        here = _map_path(word, beside, mappings)
        if position == 0 and word in PYTHONS:
            here = python or (word if shutil.which(word) else sys.executable)
        if here != word:
            changed.append((word, here))
        argv.append(here)
    if shutil.which(argv[0]) is None:
        raise CliError(
            f"{command[0]} does not exist on this machine: install it, or give its folder with "
            "--map FOLDER_OF_THE_IMAGE=FOLDER"
        )
    return HostCommand(tuple(argv), tuple(changed))


def _map_path(word: str, beside: Path, mappings: Sequence[PathMapping]) -> str:
    if not word.startswith("/") or Path(word).exists():
        return word
    inside = PurePosixPath(word)
    candidates = [each for mapping in mappings if (each := mapping.apply(inside))]
    candidates.append(beside / inside.name)
    return str(next((each for each in candidates if each.exists()), word))
