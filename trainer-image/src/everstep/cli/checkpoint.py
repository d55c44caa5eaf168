"""`everstep checkpoint …`: what is in a store, and whether it is good."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(
    name="checkpoint",
    help="""Manage checkpoints in a store: a folder, s3://bucket/run, or another URL that fsspec supports.

    s3:// takes ?endpoint=URL, ?region= and ?profile=; credentials come from where boto3 looks for them.

    Exit codes: 0 success; 1 error; 2 wrong usage; 3 the checkpoint is damaged, different or missing.
    """,
    no_args_is_help=True,
    rich_markup_mode=None,
)

UriArgument = Annotated[
    str, typer.Argument(metavar="URI", help="A folder or a URL, as given to everstep.checkpointer().")
]
KeyOption = Annotated[
    str | None,
    typer.Option("--key", "-k", metavar="KEY", help="A step (500) or attempt-step (2.3-500). Default: newest."),
]
ThreadsOption = Annotated[int, typer.Option("--threads", min=1, help="Parallel reads of 8 MiB each.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


@app.command("ls")
def ls(uri: UriArgument, as_json: JsonOption = False) -> None:
    """List committed checkpoints, newest first.

    Only indexes are read and checked; `verify` reads everything. VERIFIED: all bytes were read back after the save.
    """
    import json
    from concurrent.futures import ThreadPoolExecutor

    from everstep.checkpoint.catalog.candidates import list_candidates, read_index
    from everstep.checkpoint.catalog.verification import VerifiedCheckpoints
    from everstep.checkpoint.errors import Damaged, Missing, UnknownFormat
    from everstep.checkpoint.format.keys import Key
    from everstep.cli.checkpoint_view import CheckpointRow, describe_row, make_checkpoint_table
    from everstep.cli.places import open_named_store, translate_errors
    from everstep.cli.terminal import make_stderr, make_stdout

    with translate_errors():
        store = open_named_store(uri)

        def row(key: Key) -> CheckpointRow | None:
            try:
                return CheckpointRow(key, read_index(store, key), is_verified=key in verified)
            except Missing:
                return None  # removed meanwhile
            except Damaged as error:
                return CheckpointRow(key, None, why=f"damaged: {error}")
            except UnknownFormat as error:
                return CheckpointRow(key, None, why=f"unknown: {error}")

        keys = list_candidates(store)
        verified = set(VerifiedCheckpoints(store).marked(keys))
        with ThreadPoolExecutor(8) as pool:
            rows = [each for each in pool.map(row, keys) if each is not None]
    if as_json:
        for each in rows:
            make_stdout().print(json.dumps(describe_row(each)))
    elif rows:
        make_stdout().print(make_checkpoint_table(rows))
    else:
        make_stderr().print(f"There are no checkpoints in {store.url}.")


@app.command("verify")
def verify(
    uri: UriArgument,
    key: KeyOption = None,
    every: Annotated[bool, typer.Option("--all", help="All checkpoints instead of the newest.")] = False,
    threads: ThreadsOption = 4,
) -> None:
    """Read every byte and check every checksum. Exits with 3 if a requested checkpoint is not good.

    With a step (500), the command reads it of every attempt. A checkpoint of a later version of everstep is not good
    here. A run does not remove a checkpoint while it is read; one that it removed just before is named and not counted.
    """
    from everstep.checkpoint.catalog import candidates
    from everstep.checkpoint.catalog.leases import hold_read_lease
    from everstep.checkpoint.errors import CheckpointError, Removed, UnknownFormat, is_damage
    from everstep.cli.checkpoint_view import total_bytes
    from everstep.cli.places import EXIT_NOT_GOOD, format_key, list_matching_keys, open_named_store, translate_errors
    from everstep.cli.terminal import make_stderr, make_stdout
    from everstep.cli.transfer import format_size, make_renewing_counter, show_transfer

    bad = read = 0
    with translate_errors():
        store = open_named_store(uri)
        wanted = list_matching_keys(store, None if every else key)
        only_newest = key is None and not every
        for each in candidates.each_candidate(store) if only_newest else wanted:
            try:
                with hold_read_lease(store, each) as lease:
                    manifest = candidates.read_manifest(store, each)
                    with show_transfer(f"verify {format_key(each)}", total_bytes(manifest)) as on_bytes:
                        candidates.verify_checkpoint(
                            store, each, threads=threads, on_bytes=make_renewing_counter(lease.renew, on_bytes)
                        )
                make_stdout().print(f"{format_key(each)} is good, {format_size(total_bytes(manifest))}")
            except Removed as error:
                make_stderr().print(f"{format_key(each)}: {error}", style="yellow")
                continue
            except CheckpointError as error:
                if not (is_damage(error) or isinstance(error, UnknownFormat)):
                    raise
                bad += 1
                make_stderr().print(f"{format_key(each)} is not good: {error}", style="red")
            read += 1
            if only_newest:
                break
    if bad or not read:
        raise typer.Exit(EXIT_NOT_GOOD)


@app.command("show")
def show(
    uri: UriArgument,
    key: KeyOption = None,
    with_values: Annotated[bool, typer.Option("--values", help="Show plain values too, as step counts.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the manifest, as in docs/reference/checkpoint-format.md.")
    ] = False,
) -> None:
    """Show the content of a checkpoint.

    Tensors with type, shape and size; with --values the plain values too.
    """
    from everstep.cli.checkpoint_view import make_tensor_table, make_value_table, summarize_checkpoint
    from everstep.cli.places import hold_chosen, open_named_store, translate_errors
    from everstep.cli.terminal import make_stdout

    with translate_errors():
        store = open_named_store(uri)
        with hold_chosen(store, key) as (manifest, _):
            if as_json:
                make_stdout().print(store.read(manifest.key.manifest_name).split(b"\n")[0].decode())
                return
    out = make_stdout()
    out.print(summarize_checkpoint(manifest))
    out.print()
    out.print(make_tensor_table(manifest))
    if with_values:
        out.print()
        out.print(make_value_table(manifest))


@app.command("diff")
def diff(
    uri: UriArgument,
    other: Annotated[
        str | None, typer.Argument(metavar="[OTHER]", help="Another store. Default: the same one.")
    ] = None,
    key: KeyOption = None,
    other_key: Annotated[
        str | None,
        typer.Option("--other-key", metavar="KEY", help="Key in the other store. Default: the same, or newest."),
    ] = None,
) -> None:
    """Compare the contents of two checkpoints.

    Compares names, types, shapes, elements and plain values, however they are sharded. Exits with 3 if they differ.
    """
    from everstep.checkpoint.catalog.difference import iterate_differences
    from everstep.cli.errors import CliError
    from everstep.cli.places import EXIT_NOT_GOOD, format_key, hold_chosen, open_named_store, translate_errors
    from everstep.cli.terminal import make_stderr, make_stdout
    from everstep.cli.transfer import make_renewing_counter, show_transfer

    if other is None and other_key is None:
        raise CliError("there is nothing to compare with: give another store, or --other-key", 2)
    count = 0
    with translate_errors():
        store = open_named_store(uri)
        second = store if other is None else open_named_store(other)
        with hold_chosen(store, key) as (ours, lease), hold_chosen(second, other_key or key) as (theirs, other_lease):
            first, other_one = format_key(ours.key), format_key(theirs.key)
            with show_transfer(f"compare {first} and {other_one}", None) as on_bytes:
                advance = make_renewing_counter(lease.renew, make_renewing_counter(other_lease.renew, on_bytes))
                for each in iterate_differences((store, ours), (second, theirs), on_bytes=advance):
                    count += 1
                    make_stdout().print(f"{each.name}: {each.what}")
    if count:
        raise typer.Exit(EXIT_NOT_GOOD)
    make_stderr().print(f"{first} and {other_one} have the same content.")


@app.command("prune")
def prune(
    uri: UriArgument,
    keep_last: Annotated[int, typer.Option("--keep-last", min=1, help="Number of newest checkpoints to keep.")],
    keep_every: Annotated[
        int | None, typer.Option("--keep-every", min=1, help="Keep steps that are a multiple of this too.")
    ] = None,
    keep_best: Annotated[
        int | None, typer.Option("--keep-best", min=1, help="Keep this many of the best by --best-metric too.")
    ] = None,
    best_metric: Annotated[
        str | None, typer.Option("--best-metric", help="Name of a number in the metadata; by default loss.")
    ] = None,
    best_mode: Annotated[
        str | None, typer.Option("--best-mode", help="Which value is the best: min (default) or max.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what would be removed.")] = False,
    threads: ThreadsOption = 4,
) -> None:
    """Remove old checkpoints and the files of unfinished saves.

    The files of a save that was never committed go once they are a day old: it may still be under way. Only good
    checkpoints count towards those that stay: the command first reads all bytes of them, even if they were verified
    before. Checkpoints that are being read stay too, and so do those that are newer than the last one that stays. A
    store does not record what its run keeps by keep_best=: give --keep-best for that.
    """

    from everstep.checkpoint.catalog.best import KeepBest
    from everstep.checkpoint.catalog.verification import VerifiedCheckpoints
    from everstep.checkpoint.retention.pruning import prune_by_hand
    from everstep.cli.errors import CliError
    from everstep.cli.places import EXIT_NOT_GOOD, format_key, list_matching_keys, open_named_store, translate_errors
    from everstep.cli.terminal import make_stderr, make_stdout
    from everstep.cli.transfer import show_transfer

    if best_mode not in (None, "min", "max"):
        raise CliError(f"--best-mode {best_mode}: give min or max", 2)
    if keep_best is None and (best_metric or best_mode):
        raise CliError(
            "--best-metric and --best-mode say which are the best: give --keep-best, how many of them stay", 2
        )
    best = (
        None
        if keep_best is None
        else KeepBest(keep_best, best_metric or "loss", "max" if best_mode == "max" else "min")
    )
    with translate_errors():
        store = open_named_store(uri)
        list_matching_keys(store, None)
        # What was verified once may have been damaged since, and is to stay alone perhaps.
        found = VerifiedCheckpoints(store, mark=not dry_run, believe_marks=False, threads=threads)
        with show_transfer("verify", None) as on_bytes:
            pruning = prune_by_hand(
                found,
                keep_last=keep_last,
                keep_every=keep_every,
                keep_best=best,
                dry_run=dry_run,
                on_bytes=on_bytes,
            )
    for key, why in found.bad.items():
        make_stderr().print(f"{format_key(key)} is not good: {why}", style="red")
    for key, why in found.unknown.items():
        make_stderr().print(f"{format_key(key)} is kept: {why}", style="yellow")
    if not pruning.verified:
        raise CliError(f"no checkpoint in {store.url} is good: nothing was removed", EXIT_NOT_GOOD)
    for key in pruning.planned:
        make_stdout().print(f"{format_key(key)} would be removed")
    if dry_run:
        return
    for key in pruning.done.removed:
        make_stdout().print(f"{format_key(key)} is removed")
    for key in pruning.done.leftovers:
        make_stdout().print(f"{format_key(key)}, which was never committed, is removed")
    make_stderr().print(
        f"{format_key(pruning.verified[0])} is good and is kept; {len(pruning.done.removed)} removed, "
        f"{pruning.done.swept} leftovers swept."
    )


@app.command("copy")
def copy(
    uri: UriArgument,
    target: Annotated[str, typer.Argument(metavar="TARGET", help="The store to copy into.")],
    key: KeyOption = None,
    every: Annotated[bool, typer.Option("--all", help="All checkpoints, oldest first.")] = False,
    threads: ThreadsOption = 4,
) -> None:
    """Copy a checkpoint into another store. Every byte is verified; an interrupted copy is no checkpoint.

    By default the command copies the newest checkpoint that is good. A copy that exists is verified, and damaged parts
    are written again. With --all it copies each good checkpoint, and exits with 3 if it left one out. Checkpoints that
    a run removes meanwhile do not count.
    """
    from everstep.checkpoint.catalog import candidates
    from everstep.checkpoint.catalog.leases import hold_read_lease
    from everstep.checkpoint.errors import CheckpointError, Removed, UnknownFormat, is_damage
    from everstep.checkpoint.format.keys import Key
    from everstep.checkpoint.publish import copying
    from everstep.checkpoint.publish.copying import CopyOutcome
    from everstep.cli.checkpoint_view import total_bytes
    from everstep.cli.places import (
        EXIT_NOT_GOOD,
        format_key,
        list_matching_keys,
        open_named_store,
        read_first_good,
        translate_errors,
    )
    from everstep.cli.terminal import make_stderr, make_stdout
    from everstep.cli.transfer import show_transfer

    words = {
        CopyOutcome.COPIED: "is copied to",
        CopyOutcome.PRESENT: "exists already, and is good, in",
        CopyOutcome.REPAIRED: "existed, was not good, and is repaired in",
    }
    copied = left_out = 0
    with translate_errors():
        source, into = open_named_store(uri), open_named_store(target)

        def copy_one(each: Key) -> None:
            with hold_read_lease(source, each):
                total = total_bytes(candidates.read_manifest(source, each))
                with show_transfer(f"copy {format_key(each)}", total) as on_bytes:
                    outcome = copying.copy_checkpoint(source, into, each, threads=threads, on_bytes=on_bytes)
            make_stdout().print(f"{format_key(each)} {words[outcome]} {into.url}")

        for each in reversed(list_matching_keys(source, None)) if every else ():
            try:
                copy_one(each)
                copied += 1
            except Removed as error:
                make_stderr().print(f"{format_key(each)}: {error}", style="yellow")
            except CheckpointError as error:
                if not (is_damage(error) or isinstance(error, UnknownFormat)):
                    raise
                left_out += 1
                make_stderr().print(f"{format_key(each)} is skipped: {error}", style="red")
        if not copied and not left_out:
            read_first_good(source, key, copy_one)
    if left_out:
        raise typer.Exit(EXIT_NOT_GOOD)
