"""The table of subcommands."""

from __future__ import annotations

import typer

from everstep.cli.checkpoint import app as checkpoint
from everstep.cli.checkpoint_exchange import export, import_
from everstep.cli.checkpoint_folder import publish, restore
from everstep.cli.logs import logs
from everstep.cli.nodes import nodes
from everstep.cli.pipeline import app as pipeline
from everstep.cli.run import run
from everstep.cli.status import status
from everstep.cli.validate import validate
from everstep.cli.version import version

app = typer.Typer(
    name="everstep",
    help="Distributed training on any Kubernetes cluster that never loses a step.",
    no_args_is_help=True,
    # Help in colour costs more than all the rest of it: 120 of 300 ms.
    rich_markup_mode=None,
    # A traceback with local variables could print a token.
    pretty_exceptions_enable=False,
)
for command in (validate, run, status, logs, nodes, version):
    app.command()(command)
checkpoint.command("publish")(publish)
checkpoint.command("restore")(restore)
checkpoint.command("export")(export)
checkpoint.command("import")(import_)
app.add_typer(checkpoint)
app.add_typer(pipeline)
