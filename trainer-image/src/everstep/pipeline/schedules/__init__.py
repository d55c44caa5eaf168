"""Schedules as data: who computes and tells what in which order; made, lowered, proven, simulated and drawn.

Here belongs what can be said of a pipeline without running it. No torch; what runs a schedule is the engine.
"""

from everstep.pipeline.schedules.actions import Action, ActionKind, Schedule, dump_schedule, parse_schedule
from everstep.pipeline.schedules.checks import ScheduleViolation, complete_schedule
from everstep.pipeline.schedules.deadlock import Buffered, Rendezvous
from everstep.pipeline.schedules.generators import make_schedule
from everstep.pipeline.schedules.lowering import lower_schedule
from everstep.pipeline.schedules.picture import render_html, render_svg
from everstep.pipeline.schedules.simulation import (
    Result,
    SimulatedAction,
    compute_peak_memory,
    simulate_schedule,
    trace_memory,
)
from everstep.pipeline.schedules.table import ALIASES, NAMES, SCHEDULES, NamedSchedule, find_schedule
from everstep.pipeline.schedules.text import render_text
from everstep.pipeline.schedules.validation import Limits, in_flight, trace_held_bytes, validate_schedule

__all__ = [
    "ALIASES",
    "NAMES",
    "SCHEDULES",
    "Action",
    "ActionKind",
    "Buffered",
    "Limits",
    "NamedSchedule",
    "Rendezvous",
    "Result",
    "Schedule",
    "ScheduleViolation",
    "SimulatedAction",
    "complete_schedule",
    "compute_peak_memory",
    "dump_schedule",
    "find_schedule",
    "in_flight",
    "lower_schedule",
    "make_schedule",
    "parse_schedule",
    "render_html",
    "render_svg",
    "render_text",
    "simulate_schedule",
    "trace_held_bytes",
    "trace_memory",
    "validate_schedule",
]
