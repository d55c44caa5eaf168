"""``python -m e2e.images``: build the images, list them, or write their archives."""

from __future__ import annotations

from typing import Annotated

import typer

from e2e.images.catalogue import Image, image, images
from e2e.images.errors import ImageError

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)
Names = Annotated[list[str] | None, typer.Argument(help="Such as `trainer`; all images if none is named.")]


def _chosen(names: list[str] | None) -> list[Image]:
    return [image(name) for name in names] if names else images()


@app.command()
def build(names: Names = None) -> None:
    """Build what has changed since the last build."""
    for each in _chosen(names):
        each.build()


@app.command()
def archive(names: Names = None) -> None:
    """Write archives and print their paths."""
    for each in _chosen(names):
        typer.echo(each.archive())


@app.command("list")
def list_() -> None:
    """Name, content key, and whether that content is built."""
    for each in images():
        typer.echo(f"{each.name:40} {each.key} {'built' if each.built else '-'}")


if __name__ == "__main__":
    try:
        app()
    except ImageError as error:
        typer.echo(f"error: {error}", err=True)
        raise SystemExit(1) from None
