"""Name a checkpoint by the attempt that wrote it and its step, so that names sort as they are chosen."""

from __future__ import annotations

import math
import operator
import re
from dataclasses import dataclass
from typing import SupportsIndex

MANIFESTS = "manifests/"
DATA = "data/"
ATTEMPTS = "attempts/"
LEASES = "leases/"
VERIFIED = "verified/"
FOLDERS = (MANIFESTS, DATA, ATTEMPTS, LEASES, VERIFIED)  # all that a store has; what else lies there is somebody else's
HINT = "latest"
RUN = "run"
MOST_DIGITS = 12  # of a step

_ATTEMPT = re.compile(r"(\d{10})\.(\d{10})", re.ASCII)
_KEY = re.compile(r"(\d{10}\.\d{10})-(\d{12})", re.ASCII)
_PART = re.compile(r"(\d{5,})(?:-[0-9a-f]{1,64})?\.part", re.ASCII)


def check_step(step: SupportsIndex) -> int:
    """Return a step as a plain number: NumPy's would not get through JSON, and only rank 0 would find that out.

    Raises:
        TypeError: It is no whole number.
    """
    try:
        return operator.index(step)
    except TypeError as error:
        raise TypeError(f"a step is a whole number, not {step!r}: count the steps that are trained") from error


def check_deadline(seconds: float | None) -> float | None:
    """Return a deadline as a plain number.

    Raises:
        TypeError: It is no number.
        ValueError: It is not a time.
    """
    if seconds is None:
        return None
    if isinstance(seconds, (str, bytes)) or not hasattr(seconds, "__float__"):
        raise TypeError(f"a deadline is a number of seconds from now, not {seconds!r}")
    if math.isnan(found := float(seconds)):
        raise ValueError("a deadline is a number of seconds from now, not nan")
    return found


@dataclass(frozen=True, order=True)
class Attempt:
    """The ordered fencing token of a run: both numbers below 10**10."""

    epoch: int
    generation: int

    def __post_init__(self) -> None:
        if not (0 <= self.epoch < 10**10 and 0 <= self.generation < 10**10):
            raise ValueError(f"an attempt is two numbers of at most ten digits, not {self.epoch} and {self.generation}")

    def __str__(self) -> str:
        return f"{self.epoch:010d}.{self.generation:010d}"

    @classmethod
    def parse(cls, text: str) -> Attempt:
        """Return the attempt that str() gave `text`; ValueError for anything else."""
        found = _ATTEMPT.fullmatch(text)
        if not found:
            raise ValueError(f"not an attempt: {text!r}")
        return cls(int(found[1]), int(found[2]))


@dataclass(frozen=True, order=True)
class Key:
    """A checkpoint. The greatest is the newest: a later attempt wins whatever the steps are."""

    attempt: Attempt
    step: int

    def __post_init__(self) -> None:
        if not 0 <= self.step < 10**MOST_DIGITS:
            raise ValueError(f"a step is a number of at most twelve digits, not {self.step}")

    def __str__(self) -> str:
        return f"{self.attempt}-{self.step:012d}"

    @classmethod
    def parse(cls, text: str) -> Key:
        """Return the key that str() gave `text`; ValueError for anything else."""
        found = _KEY.fullmatch(text)
        if not found:
            raise ValueError(f"not a checkpoint's key: {text!r}")
        return cls(Attempt.parse(found[1]), int(found[2]))

    @classmethod
    def of_manifest(cls, name: str) -> Key:
        """Return the key of a manifest's name in the store; ValueError for any other name."""
        if not (name.startswith(MANIFESTS) and name.endswith(".json")):
            raise ValueError(f"not a manifest's name: {name!r}")
        return cls.parse(name[len(MANIFESTS) : -len(".json")])

    @classmethod
    def of_data(cls, name: str) -> Key:
        """Return the key whose data the file `name` of the store is; ValueError for any other name."""
        parts = name.split("/")
        if len(parts) != 4 or f"{parts[0]}/" != DATA:
            raise ValueError(f"not the name of data: {name!r}")
        return cls.parse(f"{parts[1]}-{parts[2]}")

    @classmethod
    def of_mark(cls, name: str) -> Key:
        """Return the key whose share the mark `name` says to be verified; ValueError for any other name."""
        parts = name.split("/")
        if len(parts) != 3 or f"{parts[0]}/" != VERIFIED:
            raise ValueError(f"not the name of a mark: {name!r}")
        return cls.parse(parts[1])

    @property
    def manifest_name(self) -> str:
        return f"{MANIFESTS}{self}.json"

    @property
    def data_prefix(self) -> str:
        return f"{DATA}{self.attempt}/{self.step:012d}/"

    def part_name(self, rank: int, writer: str = "") -> str:
        """Return the name of a rank's part; `writer`, in hex digits, where several may write the same checkpoint."""
        return f"{self.data_prefix}{rank:05d}{f'-{writer}' if writer else ''}.part"

    def rank_of(self, part_name: str) -> int:
        """Return the rank whose part is called so, whoever wrote it; ValueError for any other name."""
        found = _PART.fullmatch(part_name.removeprefix(self.data_prefix))
        if not (found and part_name.startswith(f"{self.data_prefix}{int(found[1]):05d}")):
            raise ValueError(f"not the name of a part of {self}: {part_name!r}")
        return int(found[1])

    def node_name(self, node: int) -> str:
        """Return the name of what a node announces to the committer."""
        return f"{self.data_prefix}{node:05d}.json"

    def is_node_name(self, name: str) -> bool:
        """Tell whether a file of this checkpoint's data is what a node announces, and not a manifest or a part."""
        node, dot, ending = name.removeprefix(self.data_prefix).partition(".")
        return node.isdecimal() and dot + ending == ".json"

    def node_manifest_name(self, node: int, sum_: str) -> str:
        """Return the name of a node manifest: by its content, so that it is written once."""
        return f"{self.data_prefix}{node:05d}-{sum_}.json"

    @property
    def mark_prefix(self) -> str:
        return f"{VERIFIED}{self}/"

    def mark_name(self, node_manifest_name: str) -> str:
        """Return the name of the mark which says that what this node manifest names was read back and found good."""
        return f"{self.mark_prefix}{node_manifest_name.rpartition('/')[2].removesuffix('.json')}"
