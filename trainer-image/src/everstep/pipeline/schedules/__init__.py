"""Schedules as data: who computes and tells what in which order; made, lowered, proven, simulated and drawn.

Here belongs what can be said of a pipeline without running it. No torch; what runs a schedule is the engine.
"""

from everstep.pipeline.schedules.actions import Action, Kind, Schedule, dump, parse
from everstep.pipeline.schedules.checks import Invalid, complete
from everstep.pipeline.schedules.deadlock import Buffered, Rendezvous
from everstep.pipeline.schedules.generators import ALIASES, NAMES, make
from everstep.pipeline.schedules.lowering import lower
from everstep.pipeline.schedules.picture import html, svg
from everstep.pipeline.schedules.simulation import Event, Result, memory, peaks, simulate
from everstep.pipeline.schedules.text import text
from everstep.pipeline.schedules.validation import Limits, held, in_flight, validate

__all__ = [
    "ALIASES",
    "NAMES",
    "Action",
    "Buffered",
    "Event",
    "Invalid",
    "Kind",
    "Limits",
    "Rendezvous",
    "Result",
    "Schedule",
    "complete",
    "dump",
    "held",
    "html",
    "in_flight",
    "lower",
    "make",
    "memory",
    "parse",
    "peaks",
    "simulate",
    "svg",
    "text",
    "validate",
]
