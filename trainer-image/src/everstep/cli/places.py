"""Stores and checkpoints as they are named on a command line, and how what is wrong with them is said."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, TypeVar

from everstep.cli.errors import CliError
from everstep.cli.terminal import make_stderr

if TYPE_CHECKING:
    from everstep.checkpoint.catalog.leases import ReadLease
    from everstep.checkpoint.format.keys import Key
    from everstep.checkpoint.format.manifest import Manifest
    from everstep.checkpoint.store.base import Store

T = TypeVar("T")

EXIT_NOT_GOOD = 3  # exit code: it could be found out, and the answer is no

_EXTRAS = {
    "boto3": "s3",
    "botocore": "s3",
    "fsspec": "checkpoint",
    "xxhash": "checkpoint",
    "google_crc32c": "checkpoint",
    "torch": "trainer",
    "safetensors": "safetensors",
}
_KEY = re.compile(r"(?:(\d+)\.(\d+)-)?(\d+)", re.ASCII)


@contextmanager
def translate_errors() -> Iterator[None]:
    """Turn errors of checkpoints and stores into those of a command, with what to do where that is known."""
    from everstep.checkpoint.errors import CheckpointError, Damaged, Full, Missing, Removed, StoreError

    try:
        yield
    except (Damaged, Missing, Removed) as error:
        raise CliError(str(error), EXIT_NOT_GOOD) from error
    except Full as error:
        raise CliError(
            f"{error}\nFree space, for example with `everstep checkpoint prune`; the store is unchanged."
        ) from error
    except StoreError as error:
        hint = "\nThe error may be temporary: try again." if error.may_pass else ""
        raise CliError(f"{error}{hint}") from error
    except (CheckpointError, FileNotFoundError, NotADirectoryError) as error:
        raise CliError(str(error)) from error
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        raise CliError(f"{error.name} is not installed: pip install 'everstep[{extra}]'") from error
    except KeyboardInterrupt:
        raise CliError("interrupted", 130) from None


def open_named_store(uri: str) -> Store:
    from everstep.checkpoint.store.base import open_store

    try:
        return open_store(uri)
    except ValueError as error:
        raise CliError(f"{error}: give a folder, or a URL as s3://bucket/run") from error


def format_key(key: Key) -> str:
    """Return a key as a person writes it: 2.3-500."""
    return f"{key.attempt.epoch}.{key.attempt.generation}-{key.step}"


def list_matching_keys(store: Store, wanted: str | None) -> list[Key]:
    """Return the committed checkpoints that are meant, the greatest first: by `500` that step of every attempt, by
    `2.3-500` one, by None all.

    Raises:
        CliError: There is none.
    """
    from everstep.checkpoint.catalog.candidates import list_candidates

    keys = list_candidates(store)
    if not keys:
        raise CliError(f"there are no checkpoints in {store.url}", EXIT_NOT_GOOD)
    found = keys if wanted is None else list(filter(_make_matcher(wanted), keys))
    if not found:
        there = ", ".join(format_key(key) for key in keys[:8])
        raise CliError(f"there is no checkpoint {wanted} in {store.url}; choose one of {there}", EXIT_NOT_GOOD)
    return found


def read_first_good(store: Store, wanted: str | None, read: Callable[[Key], T]) -> T:
    """Return what `read` makes of the first checkpoint that is meant and is good, and say what is passed over before
    it.

    What is there is listed anew before each: a run may have removed some, and saved newer ones.

    Raises:
        CliError: There is none that is meant.
        CheckpointError: None is good; what `read` raised of the last one.
    """
    from everstep.checkpoint.catalog.candidates import each_candidate
    from everstep.checkpoint.errors import CheckpointError, Removed, WriterConflict, is_damage

    list_matching_keys(store, wanted)
    is_meant = (lambda key: True) if wanted is None else _make_matcher(wanted)
    failed: tuple[Key, CheckpointError] | None = None
    for key in filter(is_meant, each_candidate(store)):
        if failed is not None:
            make_stderr().print(f"{format_key(failed[0])} is skipped: {failed[1]}", style="yellow")
        try:
            return read(key)
        except CheckpointError as error:
            # Two stores that disagree about a checkpoint are no reason for taking another one.
            if isinstance(error, WriterConflict) or not (isinstance(error, Removed) or is_damage(error)):
                raise
            failed = key, error
    if failed is not None:
        raise failed[1]
    raise CliError(f"{wanted or 'all'} was removed from {store.url} meanwhile", EXIT_NOT_GOOD)


@contextmanager
def hold_chosen(store: Store, wanted: str | None) -> Iterator[tuple[Manifest, ReadLease]]:
    """Hold the checkpoint that is meant, of several the first that can be read, and give its manifest and lease.

    Raises:
        CliError: There is none.
    """
    from everstep.checkpoint.catalog.candidates import read_manifest
    from everstep.checkpoint.catalog.leases import hold_read_lease

    with ExitStack() as held:

        def read(key: Key) -> tuple[Manifest, ReadLease]:
            with ExitStack() as own:
                lease = own.enter_context(hold_read_lease(store, key))
                manifest = read_manifest(store, key)
                held.push(own.pop_all())
            return manifest, lease

        yield read_first_good(store, wanted, read)


def resolve_step(store: Store, wanted: str | None) -> int | Key | None:
    """Return what is meant as load() takes it: a step is that of the greatest attempt that has it and is good.

    Raises:
        CliError: There is none.
    """
    if wanted is None:
        return None
    found = list_matching_keys(store, wanted)
    return found[0] if "-" in wanted else found[0].step


def _make_matcher(text: str) -> Callable[[Key], bool]:
    match = _KEY.fullmatch(text)
    if match is None:
        raise CliError(f"{text!r} is not a checkpoint: give a step (500), or an attempt and a step (2.3-500)", 2)
    epoch, generation, step = (None if group is None else int(group) for group in match.groups())

    def matches(key: Key) -> bool:
        attempt = (key.attempt.epoch, key.attempt.generation)
        return key.step == step and (epoch is None or attempt == (epoch, generation))

    return matches
