"""The `everstep` command: one file per subcommand, plus the rooms they share (terminal, log lines, cluster, local run).

What a subcommand needs beyond typer is imported inside it: `everstep --help` must answer at once, and `everstep
validate` must work where neither torch nor the Kubernetes client is installed.
"""

from __future__ import annotations

import sys


def main() -> None:
    from everstep.cli.app import app
    from everstep.cli.errors import CliError

    try:
        app()
    except CliError as error:
        sys.stderr.write(f"everstep: {error}\n")
        sys.exit(error.code)
