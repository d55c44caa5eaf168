"""`everstep checkpoint export` and `import`: checkpoints in other libraries' files, and back."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from everstep.cli.checkpoint import KeyOption, UriArgument


class ForeignFormat(StrEnum):
    """Foreign formats."""

    safetensors = "safetensors"
    huggingface = "huggingface"
    dcp = "dcp"
    torch = "torch"


RenameOption = Annotated[
    list[str] | None,
    typer.Option(
        "--rename",
        metavar="OLD=NEW",
        help="Replace a prefix of full names ('model.encoder.'); of an export to safetensors or huggingface, of names "
        "within the object ('encoder.'). Repeatable.",
    ),
]
ObjectOption = Annotated[
    str, typer.Option("--object", metavar="NAME", help="The object, as the training script calls it.")
]
OnlyOption = Annotated[
    list[str] | None,
    typer.Option("--only", metavar="GLOB", help="Only full names that match, as 'model.*'. Repeatable. Default: all."),
]


def export(
    uri: UriArgument,
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="A folder, or a file that ends with .safetensors.")],
    to: Annotated[
        ForeignFormat, typer.Option("--to", help="safetensors and huggingface: one object; dcp: all of them.")
    ],
    key: KeyOption = None,
    name: ObjectOption = "model",
    only: OnlyOption = None,
    rename: RenameOption = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", metavar="TYPE", help="For floating tensors: bfloat16, float32 …")
    ] = None,
    max_shard_size: Annotated[
        str, typer.Option("--max-shard-size", metavar="SIZE", help="Limit for each safetensors file of a folder.")
    ] = "5GB",
    config: Annotated[
        Path | None, typer.Option("--config", metavar="FILE", help="A config.json to copy into the folder.")
    ] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Replace what is there.")] = False,
) -> None:
    """Export a checkpoint for another library.

    As a file of safetensors, as a folder that Hugging Face's from_pretrained() reads, or as one that
    torch.distributed.checkpoint loads. The checkpoint is verified, and the export is complete or absent.
    """
    from everstep.checkpoint.exchange import exporting
    from everstep.cli.errors import CliError
    from everstep.cli.places import format_key, open_named_store, resolve_step, translate_errors
    from everstep.cli.terminal import make_stdout

    if to is ForeignFormat.torch:
        raise CliError(
            "--to torch is not supported: load the checkpoint with everstep.load() and save it with torch.save()", 2
        )
    if to is ForeignFormat.dcp and config is not None:
        raise CliError("--config is for --to safetensors and huggingface", 2)
    if to is not ForeignFormat.dcp and only:
        raise CliError("--only is for --to dcp: name one --object otherwise", 2)
    if to is ForeignFormat.huggingface and target.suffix == ".safetensors":
        raise CliError(f"{target} is a file, and Hugging Face reads a folder: give one, or --to safetensors", 2)
    try:
        limit = exporting.parse_size(max_shard_size)
    except ValueError as error:
        raise CliError(f"--max-shard-size: {error}", 2) from error
    cast, renames = _parse_dtype(dtype), _parse_renames(rename)
    with translate_errors():
        wanted = resolve_step(open_named_store(uri), key)
        if to is ForeignFormat.dcp:
            done = exporting.export_dcp(uri, target, step=wanted, only=only, rename=renames, cast=cast, replace=replace)
        else:
            done = exporting.export_safetensors(
                uri, target, step=wanted, name=name, rename=renames, cast=cast, max_shard_bytes=limit, config=config,
                replace=replace,
            )  # fmt: skip
    make_stdout().print(f"{format_key(done)} is exported to {target}")


def import_(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="A file or a folder of another library.")],
    uri: UriArgument,
    from_: Annotated[
        ForeignFormat, typer.Option("--from", help="torch: a file of torch.save(). dcp: only if you trust it.")
    ],
    step: Annotated[int, typer.Option("--step", min=0, max=10**12 - 1, help="Step of the new checkpoint.")] = 0,
    name: ObjectOption = "model",
    only: OnlyOption = None,
    rename: RenameOption = None,
    optimizer_order: Annotated[
        Path | None,
        typer.Option("--optimizer-order", metavar="FILE", help="Names of the optimizer's parameters, one a line."),
    ] = None,
) -> None:
    """Import another library's file as a checkpoint.

    restore() and load() take it as any other; it is the newest of its store. An optimizer whose parameters have numbers
    in several groups needs their names, in the order in which it was given them.
    """
    from everstep.checkpoint.exchange import importing
    from everstep.cli.errors import CliError
    from everstep.cli.places import format_key, translate_errors
    from everstep.cli.terminal import make_stdout

    readers: dict[ForeignFormat, Any] = {
        ForeignFormat.torch: importing.import_torch,
        ForeignFormat.dcp: importing.import_dcp,
        ForeignFormat.safetensors: importing.import_safetensors,
        ForeignFormat.huggingface: importing.import_safetensors,
    }
    with translate_errors():
        if not source.exists():
            raise FileNotFoundError(f"there is no {source}")
        more: dict[str, Any] = {}
        if optimizer_order is not None:
            if from_ not in (ForeignFormat.torch, ForeignFormat.dcp):
                raise CliError(f"--optimizer-order is for --from torch or dcp: {from_.value} holds no optimizer", 2)
            more["optimizer_order"] = optimizer_order.read_text().split()
        key = readers[from_](source, uri, step=step, name=name, only=only, rename=_parse_renames(rename), **more)
    make_stdout().print(f"{source} is imported as {format_key(key)}")


def _parse_renames(given: list[str] | None) -> dict[str, str] | None:
    from everstep.cli.errors import CliError

    found: dict[str, str] = {}
    for each in given or ():
        old, equals, new = each.partition("=")
        if not equals:
            raise CliError(f"--rename {each}: write it as OLD=NEW", 2)
        found[old] = new
    return found or None


def _parse_dtype(name: str | None) -> Any:
    from everstep.cli.errors import CliError

    if name is None:
        return None
    import torch

    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise CliError(f"--dtype {name}: torch has no such type; give one as bfloat16, float16 or float32", 2)
    return found
