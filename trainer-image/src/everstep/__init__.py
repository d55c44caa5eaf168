"""everstep: distributed training on any Kubernetes cluster that never loses a step.

`everstep.progress(step, total=…, loss=…)` reports a step; `everstep.checkpointer()` saves and restores a run where the
job says, or `everstep.checkpointer(store, …)` where a script says, with `MemoryOptions`, `RetentionOptions`,
`StorageOptions` and `TimeOptions` for what is rarely said; `has_checkpoint_store()` tells whether the job says where.
`everstep.load(uri)`, `load_into(uri, model=model)`, `list_checkpoints(uri)` and `best(uri, metric)` only read.
`everstep.data.Sampler` has the order of the data, which survives restarts at any number of ranks.
`FromRank(object)` and `PerRank(object)` say whose state is saved where ranks hold different ones.
Everything else is in the submodules; importing this package imports nothing but the standard library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from everstep import data as data
    from everstep.checkpoint.catalog.listing import best as best
    from everstep.checkpoint.catalog.listing import list_checkpoints as list_checkpoints
    from everstep.checkpoint.load.api import load as load
    from everstep.checkpoint.load.api import load_into as load_into
    from everstep.checkpoint.session.checkpointer import Checkpointer as checkpointer
    from everstep.checkpoint.session.job_arguments import has_checkpoint_store as has_checkpoint_store
    from everstep.checkpoint.session.options import MemoryOptions as MemoryOptions
    from everstep.checkpoint.session.options import RetentionOptions as RetentionOptions
    from everstep.checkpoint.session.options import StorageOptions as StorageOptions
    from everstep.checkpoint.session.options import TimeOptions as TimeOptions
    from everstep.checkpoint.state.kinds import FromRank as FromRank
    from everstep.checkpoint.state.kinds import PerRank as PerRank
    from everstep.progress import progress as progress

__all__ = [
    "FromRank",
    "MemoryOptions",
    "PerRank",
    "RetentionOptions",
    "StorageOptions",
    "TimeOptions",
    "best",
    "checkpointer",
    "has_checkpoint_store",
    "list_checkpoints",
    "load",
    "load_into",
    "progress",
]

_WHERE = {
    "FromRank": ("everstep.checkpoint.state.kinds", "FromRank"),
    "MemoryOptions": ("everstep.checkpoint.session.options", "MemoryOptions"),
    "PerRank": ("everstep.checkpoint.state.kinds", "PerRank"),
    "RetentionOptions": ("everstep.checkpoint.session.options", "RetentionOptions"),
    "StorageOptions": ("everstep.checkpoint.session.options", "StorageOptions"),
    "TimeOptions": ("everstep.checkpoint.session.options", "TimeOptions"),
    "best": ("everstep.checkpoint.catalog.listing", "best"),
    "checkpointer": ("everstep.checkpoint.session.checkpointer", "Checkpointer"),
    "has_checkpoint_store": ("everstep.checkpoint.session.job_arguments", "has_checkpoint_store"),
    "list_checkpoints": ("everstep.checkpoint.catalog.listing", "list_checkpoints"),
    "load": ("everstep.checkpoint.load.api", "load"),
    "load_into": ("everstep.checkpoint.load.api", "load_into"),
    "progress": ("everstep.progress", "progress"),
}


_PACKAGES = {"data"}


def __getattr__(name: str) -> Any:
    # Lazily, since the agent carries this file but not the library.
    if name in _WHERE:
        from importlib import import_module

        module, attribute = _WHERE[name]
        return getattr(import_module(module), attribute)
    if name in _PACKAGES:
        from importlib import import_module

        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
