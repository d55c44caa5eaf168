"""`everstep checkpoint publish` and `restore`: folders of other programs as checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from everstep.cli.checkpoint import KeyOption, ThreadsOption, UriArgument


def publish(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder that another program saves.")],
    uri: UriArgument,
    step: Annotated[
        int | None,
        typer.Option("--step", min=0, help="Default: the number at the end of the folder's name, else the next step."),
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

    Never of half of it: what changes while it is read is not committed. For programs that save in their own way: start
    it beside the program with --watch; what is complete when it is told to stop is still published.
    """
    import signal
    import threading

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
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stop.set())
        publisher.Publisher(store, folder, marker=marker, quiet=quiet, each=each, keep_last=keep_last, tell=tell).run(
            stop
        )


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
    threads: ThreadsOption = 4,
) -> None:
    """Restore a published folder.

    The newest that is good, verified, whole or not at all.
    """
    from contextlib import ExitStack

    from everstep.checkpoint.catalog import candidates
    from everstep.checkpoint.errors import CheckpointError
    from everstep.checkpoint.format.manifest import Manifest
    from everstep.checkpoint.publish import folder as folders
    from everstep.cli.checkpoint_view import total_bytes
    from everstep.cli.places import format_key, open_named_store, resolve_step, translate_errors
    from everstep.cli.terminal import make_stderr, make_stdout
    from everstep.cli.transfer import show_transfer

    if if_empty and folder.is_dir() and any(folder.iterdir()):
        make_stderr().print(f"{folder} is not empty and is left as it is.")
        return
    with translate_errors(), ExitStack() as bars:
        store = open_named_store(uri)
        if if_any and not candidates.list_candidates(store):
            make_stderr().print(f"Nothing was saved in {store.url} yet.")
            return
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
            make_stderr().print(f"{folder} was restored by another process, and is left as it is.")
            return
    for why in bad:
        make_stderr().print(f"not good, skipped: {why}", style="red")
    make_stdout().print(f"{folder} is restored from {format_key(manifest.key)}")
