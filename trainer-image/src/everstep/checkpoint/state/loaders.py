"""Positions of torchdata's loaders: where a restored one begins, and which its state does not tell.

Read with torchdata 0.11, whose own fields are asked for where no call of it tells.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch

from everstep.checkpoint.errors import CheckpointError
from everstep.checkpoint.state.kinds import Saved, Stateful
from everstep.checkpoint.state.loaded import is_instance
from everstep.checkpoint.state.loader_samplers import list_parts, takes_epoch

_log = logging.getLogger("everstep.checkpoint")

_TORCHDATA = "torchdata.stateful_dataloader"
_NODES = ("torchdata.nodes", "Loader")
_NOTHING = object()


def check_position(loader: Any, name: str) -> None:
    """See that a loader's state says where it is, and where all of its workers are.

    What accelerate's prepare() returns says that it is a loader of torch or torchdata, and holds one. Its own state is
    behind that one's with workers, and says at the end of an epoch nothing of which comes next.

    A persistent worker that begins another epoch tells the state of its dataset before anybody has asked for the first
    item. By then a dataset that goes back to its first item in a generator has not: its state is that of the end of the
    former epoch, and a worker that is restored from it has nothing to give in this one.

    Args:
        loader: Any DataLoader.
        name: What it is called in messages.

    Raises:
        CheckpointError: It only stands for a loader; or a worker has not given a batch in this epoch, and has not the
            state of its first epoch.
    """
    if type(loader) is not loader.__class__:
        raise CheckpointError(
            f"{name} is a {type(loader).__name__}, which stands for another loader as what accelerate's prepare() "
            "returns does: a run that is resumed from its state repeats samples and leaves others out. Do not give the "
            "loader to prepare(): make it with an everstep.data.Sampler as its batch_sampler, and give that sampler to "
            "restore(). Or keep the epoch and the number of its batches in a dictionary, and begin with set_epoch() "
            "and accelerator.skip_first_batches()"
        )
    iterator: Any = getattr(loader, "_iterator", None)
    if not (_is_stateful_loader(loader) and loader.num_workers and loader.persistent_workers and iterator is not None):
        return
    # Workers take turns: after as many batches each of them has given one, or has ended.
    if iterator._finished or iterator._num_yielded >= loader.num_workers or not isinstance(loader.dataset, Stateful):
        return
    states = iterator.state_dict()["_snapshot"]["_worker_snapshots"]
    waiting = [states[f"worker_{worker}"] for worker in range(iterator._num_yielded, loader.num_workers)]
    first: Any = None
    for state in waiting:
        position = state["dataset_state"]
        if position is None or (state["fetcher_state"] or {}).get("dataset_iter_state") is not None:
            continue
        first = loader.dataset.state_dict() if first is None else first
        if not _is_equal(position, first):
            raise CheckpointError(
                f"{name}: a worker of this loader has given no batch in this epoch yet, and its dataset's state_dict() "
                "may still be that of the end of the epoch before: a resumed run could lose what this worker gives in "
                f"the epoch. Save when {loader.num_workers} batches or more of the epoch are trained, keep the "
                "position in an iterator with a state_dict() of its own that the dataset's __iter__() returns, or make "
                "the loader without persistent_workers=True"
            )


def read_state(inner: Any, *, is_saved: bool = False) -> Any:
    """Return the state of any object; of a loader of torchdata that has not begun nothing, or what it was given.

    To ask that one makes it begin: its samplers draw an order, in the epoch that they have by then, and a script gives
    them another one before it iterates. Where none takes an epoch, one that is saved does begin: its order may follow
    from what it drew when it was made.

    Args:
        inner: The object.
        is_saved: Whether the state is.
    """
    if not is_loader_of_torchdata(inner):
        return inner.state_dict()
    is_nodes = is_loader_of_nodes(inner)
    iterator = inner._it if is_nodes else inner._iterator
    given = inner._next_iter_state_dict if is_nodes else inner.next_iter_state
    begins = is_saved and not is_nodes and not given and not takes_epoch(inner)
    return inner.state_dict() if begins or iterator is not None else given or {}


def is_loader_of_torchdata(inner: object) -> bool:
    """Tell whether an object is a loader of torchdata, and of no class that says a state of its own."""
    loader: Any = inner
    is_whole = _is_stateful_loader(loader) and type(loader).state_dict.__module__.startswith(_TORCHDATA)
    return is_whole or is_loader_of_nodes(inner)


def is_loader_of_nodes(inner: object) -> bool:
    """Tell whether an object is a loader of torchdata's nodes."""
    return is_instance(inner, *_NODES)


def why_other_workers(loader: Any, name: str, saved: Saved) -> str | None:
    """Return why a loader does not take in the state of one with another number of workers; None where it does.

    Args:
        loader: Any loader.
        name: What it is called in messages.
        saved: Its state in the checkpoint.
    """
    if not _is_stateful_loader(loader) or "_iterator_finished" not in saved.values:
        return None
    workers = saved.value_or("_snapshot._main_snapshot._num_workers", 0)
    if workers == loader.num_workers:
        return None
    return (
        f"{name} was saved with {workers} workers, and has {loader.num_workers} here, and its state is that of its "
        f"workers: make the loader with num_workers={workers}, or leave it out of restore(). An everstep.data.Sampler "
        "that is given to restore() goes on where it was, with any loader"
    )


def begin_loader(loader: Any, name: str) -> None:
    """Bring a loader to the position that it was given.

    torchdata's takes it in when an iteration begins, and draws a number then; the run that was saved had drawn its own
    long before. So it begins here, before the random generators come back. To ask for its state is what begins it: the
    script's own iteration goes on with what that has begun.

    Args:
        loader: Any loader with a state_dict(), that has loaded one.
        name: What it is called in messages.
    """
    if is_loader_of_nodes(loader):
        _begin_nodes(loader)
        return
    given = loader.next_iter_state if _is_stateful_loader(loader) else None
    state = loader.state_dict()
    if given:
        _count_once(loader._iterator, given)
        _take_positions(loader)
    if _misses_a_draw(loader):
        torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
    if _is_stateful_loader(loader) and not loader.num_workers and loader._iterator._finished:
        _end_iteration(loader, state, name)


def _count_once(iterator: Any, given: dict[str, Any]) -> None:
    """Let an iterator know how many batches it has given, where it has skipped them in a dataset without a state.

    torchdata's counts those that it skips once more, and a run that was resumed twice would leave as many out.
    """
    if "_snapshot" not in given:
        iterator._num_yielded = given["_num_yielded"]
        return
    counted = iterator._num_yielded - given["_snapshot"]["_snapshot_step"] - given["_steps_since_snapshot"]
    iterator._num_yielded -= counted
    iterator._snapshot["_snapshot_step"] -= counted


def _take_positions(loader: Any) -> None:
    """Let torchdata's own DistributedSampler know where it is: it takes a position in when it is asked for an item.

    Before that it would say that it is at its first one; and where an epoch was at its end, the next one would begin
    there, and have nothing.
    """
    for each in list_parts(loader):
        sampler: Any = each
        if (
            is_instance(each, f"{_TORCHDATA}.sampler", "StatefulDistributedSampler")
            and sampler.next_yielded is not None
        ):
            sampler.yielded = sampler.next_yielded
            if loader._iterator._finished:
                sampler.next_yielded = None


def begin_anew(loader: Any) -> None:
    """Have a loader of torchdata begin at its first item, as one that had not begun when it was saved."""
    if not is_loader_of_nodes(loader):
        loader.next_iter_state = None
        loader.load_state_dict({})  # it begins when it is iterated
        return
    loader._next_iter_state_dict = None
    if loader._it is not None:
        _begin_nodes(loader)


def _begin_nodes(loader: Any) -> None:
    """Bring a loader of torchdata's nodes to the position that it was given.

    It keeps that for the iteration that begins next, and passes it over where it was asked for its state before that.
    Its iterator says where it was when it looked for its first item, until somebody takes that. Where there was none,
    since an epoch was at its end, it would say that for ever.
    """
    loader._iter_for_state_dict = False
    if loader._it is not None:  # the script's own iteration may be this one
        loader._it._cached_state_dict = None
    iterator: Any = iter(loader)
    if iterator._cached_item is None:
        iterator._cached_state_dict = None
    loader._iter_for_state_dict = True  # the script's own iteration goes on with what has begun


def _end_iteration(loader: Any, state: dict[str, Any], name: str) -> None:
    """Let a dataset that was saved at the end of an epoch come to it, so that the next iteration is a whole one.

    Its generator is what takes the position in; the loader has made one, and would leave it for another.
    """
    fetcher: Any = loader._iterator._dataset_fetcher
    position = state.get("dataset_state")
    rest: Iterator[Any] | None = getattr(fetcher, "dataset_iter", None)
    if rest is None or position is None or isinstance(rest, Stateful):
        return
    if next(rest, _NOTHING) is not _NOTHING:
        loader.dataset.load_state_dict(position)  # it had begun the next epoch: back to before its first item
    elif not _is_equal(loader.dataset.state_dict(), position):
        _log.warning(
            "%s: its dataset was saved at the end of an epoch, and to come to that end once more has changed its "
            "state: where it counts epochs, it has counted one twice. Save within an epoch, or change in __iter__() "
            "nothing that state_dict() returns before load_state_dict() is taken in",
            name,
        )


def _misses_a_draw(loader: Any) -> bool:
    """Tell whether a loader has put its generator back to where it shuffled, without the number that it drew after.

    torchdata's does without workers, where it was given one generator for both: it draws the seed of workers, shuffles,
    and then takes its position in, which shuffles again.
    """
    indices: Any = getattr(loader, "_index_sampler", None)
    shuffling: Any = getattr(indices, "sampler", indices)
    return (
        _is_stateful_loader(loader)
        and is_instance(shuffling, f"{_TORCHDATA}.sampler", "RandomSampler")
        and loader.num_workers == 0
        and loader.generator is not None
        and shuffling.generator is loader.generator
    )


def _is_stateful_loader(loader: Any) -> bool:
    return is_instance(loader, _TORCHDATA, "StatefulDataLoader")


def _is_equal(one: Any, other: Any) -> bool:
    """Tell whether two states of a dataset are equal; where that cannot be told, as with arrays, they are not."""
    try:
        return bool(one == other)
    except (RuntimeError, TypeError, ValueError):
        return False
