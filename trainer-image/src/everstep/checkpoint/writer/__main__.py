"""Start the writer process of a node: `python -m everstep.checkpoint.writer DIRECTORY`."""

from __future__ import annotations

from everstep.checkpoint.writer.writer import main

main()
