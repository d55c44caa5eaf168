"""`everstep checkpoint publish` and `restore`: folders of other programs as checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from everstep.cli.checkpoint import KeyOption, ThreadsOption, UriArgument

if TYPE_CHECKING:
    from everstep.checkpoint.store.base import Store

PAUSE_SECONDS = 5.0  # between two tries where a store is unavailable


def publish(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder that another program saves.")],
    uri: UriArgument,
    step: Annotated[
        int | None,
        typer.Option(
            "--step",
            min=0,
            max=10**12 - 1,
            help="Default: the number at the end of the folder's name, else the next step.",
        ),
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Publish whenever the folder is complete, until SIGTERM or Ctrl-C.")
    ] = False,
    marker: Annotated[
        str | None, typer.Option("--marker", help="The folder is complete when this file in it changes. Needs --watch.")
    ] = None,
    quiet: Annotated[
        float, typer.Option("--quiet", min=0, help="Without --marker: complete after this many seconds without change.")
    ] = 5.0,
    each: Annotated[
        str | None, typer.Option("--each", help="Publish folders in DIR that match, as 'checkpoint-*'. Needs --watch.")
    ] = None,
    keep_last: Annotated[
        int | None,
        typer.Option("--keep-last", min=1, help="Remove older ones when a new one is verified. Needs --watch."),
    ] = None,
) -> None:
    """Make a checkpoint of a folder.

    A folder that changes while it is read is not committed. For a program that writes its own files, start the command
    beside it with --watch: on SIGTERM or Ctrl-C it still publishes what is complete, and then exits.
    """
    import signal
    import threading

    from everstep.checkpoint.errors import StoreError
    from everstep.checkpoint.events import CheckpointEvent
    from everstep.checkpoint.publish import publisher
    from everstep.checkpoint.publish.folder import Contents
    from everstep.cli.errors import CliError
    from everstep.cli.places import format_key, open_named_store, translate_errors
    from everstep.cli.terminal import make_stderr, make_stdout
    from everstep.cli.transfer import show_transfer

    if not watch and (marker or each or keep_last):
        raise CliError("--marker, --each and --keep-last need --watch", 2)
    if watch and step is not None:
        raise CliError("--step is for publishing once: with --watch steps are counted", 2)

    def tell(event: CheckpointEvent) -> None:
        if event.name == "saved" and event.key is not None:
            make_stdout().print(f"{folder} is published as {format_key(event.key)}")
        elif event.name == "untidy":
            make_stderr().print(f"older checkpoints were not removed: {event.why}", style="yellow")
        elif event.name == "skipped":
            make_stderr().print(f"not published: {event.why}", style="yellow")
        else:
            again = "" if event.key else " yet, trying again"
            make_stderr().print(f"not published{again}: {event.why}", style="yellow")

    with translate_errors():
        store = open_named_store(uri)
        if not watch:
            total = sum(file.size for file in Contents.of(folder).files)
            with show_transfer(f"publish {folder}", total) as on_bytes:
                manifest = publisher.publish_folder(store, folder, step=step, on_bytes=on_bytes)
            make_stdout().print(f"{folder} is published as {format_key(manifest.key)}")
            return
        stop = threading.Event()

        def handle_stop(*_: object) -> None:
            if stop.is_set():
                raise KeyboardInterrupt  # whoever repeats it does not wait for a store that is unavailable
            stop.set()

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, handle_stop)
        while True:
            try:
                watching = publisher.Publisher(
                    store, folder, marker=marker, quiet=quiet, each=each, keep_last=keep_last, tell=tell
                )
                break
            except StoreError as error:
                # A container that ends is begun again ever more slowly, and may not run when the program ends.
                if not error.may_pass or stop.is_set():
                    raise
                make_stderr().print(f"not published yet, trying again: {error}", style="yellow")
            stop.wait(PAUSE_SECONDS)
        watching.run(stop)


def restore(
    uri: UriArgument,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to create; absent or empty.")],
    key: KeyOption = None,
    replace: Annotated[bool, typer.Option("--replace", help="Replace what is there.")] = False,
    if_any: Annotated[
        bool, typer.Option("--if-any", help="Exit with 0 if nothing was ever saved: a first start.")
    ] = False,
    if_empty: Annotated[
        bool, typer.Option("--if-empty", help="Exit with 0 if there is something in DIR: a program that starts again.")
    ] = False,
    wait: Annotated[
        float, typer.Option("--wait", min=0, help="Try again for so many seconds while the store is unavailable.")
    ] = 0.0,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="In a job that publishes there next: fail if another job has used the store."),
    ] = False,
    threads: ThreadsOption = 4,
) -> None:
    """Restore a published folder.

    Restores the newest one that is good, after verification, completely or not at all.
    """
    import time
    from contextlib import ExitStack

    from everstep.checkpoint.catalog import candidates
    from everstep.checkpoint.errors import CheckpointError, Full, StoreError
    from everstep.checkpoint.format.manifest import Manifest
    from everstep.checkpoint.publish import folder as folders
    from everstep.cli.checkpoint_view import total_bytes
    from everstep.cli.places import format_key, open_named_store, resolve_step, translate_errors
    from everstep.cli.terminal import make_stderr, make_stdout
    from everstep.cli.transfer import show_transfer

    until = time.monotonic() + wait

    def restore_once(bars: ExitStack) -> str:
        store = open_named_store(uri)
        kept = if_empty and folder.is_dir() and any(folder.iterdir())
        try:
            if resume:
                _claim_store(store)
        except StoreError as error:
            if not (kept and error.may_pass):
                raise
            make_stderr().print(f"nobody can tell whose the store is: {error}", style="yellow")
        if kept:
            return f"{folder} is not empty and is left as it is."
        if if_any and not candidates.list_candidates(store):
            return f"Nothing was saved in {store.url} yet."
        wanted = resolve_step(store, key) if key else None
        advance = [lambda count: None]

        def begin(manifest: Manifest) -> None:
            bars.close()
            advance[0] = bars.enter_context(show_transfer(f"restore {format_key(manifest.key)}", total_bytes(manifest)))

        try:
            manifest, bad = folders.restore_folder(
                store,
                folder,
                step=wanted,
                replace=replace,
                threads=threads,
                on_start=begin,
                on_bytes=lambda count: advance[0](count),
            )
        except CheckpointError:
            # Of several pods that share a volume one is the first: what it has put there is whole.
            if not (if_empty and folder.is_dir() and any(folder.iterdir())):
                raise
            return f"{folder} was restored by another process, and is left as it is."
        bars.close()
        for why in bad:
            make_stderr().print(f"not good, skipped: {why}", style="red")
        make_stdout().print(f"{folder} is restored from {format_key(manifest.key)}")
        return ""

    with translate_errors(), _end_at_term():
        while True:
            try:
                with ExitStack() as bars:
                    message = restore_once(bars)
                break
            except StoreError as error:
                if not error.may_pass or isinstance(error, Full) or time.monotonic() >= until:
                    raise
                make_stderr().print(f"not restored yet, trying again: {error}", style="yellow")
            time.sleep(PAUSE_SECONDS)
    if message:
        make_stderr().print(message)


@contextmanager
def _end_at_term() -> Iterator[None]:
    """End at SIGTERM, which Linux keeps from the first process of a container that does not handle it."""
    import signal

    def end(*_: object) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _claim_store(store: Store) -> None:
    """Claim the store for the job that runs this; with the attempt, where this pod has one, as the one that publishes.

    Raises:
        CheckpointError: Another job has used it: what this one publishes would never be chosen, or be mixed with that.
    """
    from everstep.checkpoint.publish import attempts, fence, publication

    if fence.get_given_attempt() is not None:
        publication.claim_attempt(store)
    else:
        attempts.claim_for_job(store, attempts.get_own_job())
