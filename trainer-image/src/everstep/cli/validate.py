"""`everstep validate`: what the API server would say, without one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def validate(
    files: Annotated[list[Path], typer.Option("--file", "-f", help="Manifests; '-' is standard input. Repeatable.")],
) -> None:
    """Check manifests of TrainingJobs and TrainingPools.

    Reports all errors, with file, line, field and what to do. Objects of other kinds are not checked.
    """
    from everstep.cli.manifests import check_manifest
    from everstep.cli.terminal import make_stderr, make_stdout

    out, err = make_stdout(), make_stderr()
    mistakes = 0
    for file in files:
        verdicts, findings = check_manifest(file)
        mistakes += len(findings)
        for finding in findings:
            err.print(finding, style="red")
        for verdict in verdicts:
            out.print(f"{file}: {verdict}")
    if mistakes:
        raise typer.Exit(1)
