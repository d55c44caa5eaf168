"""Before a step, the ranks that read tell all others what they have read, so that nobody starts alone.

Ranks with a stage that uses an argument of the model read that argument; the rank of the last stage reads the targets.
Others need neither. Every rank must come to the same step, with the same number of samples; and so must all replicas,
but for the samples.
"""

from __future__ import annotations

import hashlib
import itertools
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from everstep.pipeline.engine.digests import BatchDigest, digest_batch
from everstep.pipeline.engine.microbatch import Parts, batch_size, select_arguments
from everstep.pipeline.engine.nested import flatten_tensors, tensors_of
from everstep.pipeline.engine.strides import describe_strides
from everstep.pipeline.errors import Everywhere, PipelineError
from everstep.pipeline.transport.base import Transport

T = TypeVar("T")
TRAIN, ACCUMULATE, EVALUATE, CLIP = "a step", "a batch of a step", "an evaluation", "a call of clip_grad_norm_"
_CALL_ALIKE = "call step(), evaluate() and clip_grad_norm_() alike and equally often on all ranks"
Moment = tuple[int, int, str]  # optimizer steps, batches since, and what for


class Disagreement(Everywhere):
    """The ranks do not agree on a step."""


@dataclass(frozen=True)
class Reads:
    """The parts of a batch that this rank needs: arguments of the model by name, and whether it needs the targets."""

    inputs: frozenset[str]
    targets: bool


@dataclass(frozen=True)
class Word:
    """The message of a rank that reads a batch: its step, the number and shapes of its samples, or what is wrong with
    them; and by what to see that others read the same samples."""

    step: Moment
    samples: int | None
    shapes: str
    wrong: str = ""
    digest: BatchDigest = field(default_factory=BatchDigest)


def inspect_batch(reads: Reads, step: Moment, batch: Any, targets: Any, unsplit_inputs: frozenset[str]) -> Word:
    """Return the message of this rank about its batch, or about the error that stands in its place.

    Args:
        reads: The parts of the batch that this rank needs.
        step: The number of optimizer steps, the number of batches since the last one, and the purpose.
        batch: The batch, or the `PipelineError` that was raised in its place.
        targets: The targets of the loss; None if there are none.
        unsplit_inputs: Names of the arguments that go to each micro-batch as they are.
    """
    try:
        if isinstance(batch, PipelineError):
            raise batch
        inputs = _read_inputs(reads, batch)
        if reads.targets and targets is None and step[2] != EVALUATE:
            raise PipelineError(
                "it runs the loss, and got no targets; if the model's own result is the loss, give as targets "
                "what it was made from, as the labels"
            )
        if step[2] != EVALUATE and any(each.requires_grad for each in tensors_of([inputs, targets])):
            raise PipelineError(
                "a tensor of its batch requires gradients, and a pipeline computes none for its inputs: detach() it, "
                "or make what learns in front of it a part of the model"
            )
        counted = {"its batch has": batch_size(inputs, unsplit_inputs), "its targets have": None}
        if reads.targets:
            counted["its targets have"] = batch_size(targets, are_targets=True)
        # A rank may read what has no samples: a number, an argument that goes whole to each micro-batch.
        sizes = {what: size for what, size in counted.items() if size is not None}
        if len(set(sizes.values())) > 1:
            raise PipelineError(", ".join(f"{what} {size} samples" for what, size in sizes.items()))
        digest = digest_batch(batch, targets, step[0] + step[1])
        return Word(step, next(iter(sizes.values()), None), _describe_shapes(inputs), digest=digest)
    except PipelineError as error:
        return Word(step, None, "", str(error))


def agree_on_batch(
    transport: Transport, mine: Word | Moment, readers: Sequence[int], frozen: str = ""
) -> tuple[int, str]:
    """The samples of this pipeline's batch, and the signature of its inputs; the same on all ranks.

    `mine` is where this rank is, if it reads nothing; `frozen` says which of its parameters do not learn. Disagreement
    on all ranks; PipelineError on one that reads nothing and is elsewhere, which nobody knows but itself.
    """
    words: dict[int, Word] = {}
    if isinstance(mine, Word):
        words[transport.rank] = mine
        message = pickle.dumps(mine)
        for rank in range(transport.size):
            if rank != transport.rank:
                transport.tell(message, rank)
    for rank in readers:
        if rank != transport.rank:
            words[rank] = pickle.loads(transport.hear(rank))  # noqa: S301 - from a rank of this job
    ordered = [(rank, words[rank]) for rank in readers]
    samples, wrong = _of_readers(ordered)
    step = ordered[0][1].step
    if not wrong and not isinstance(mine, Word) and mine != step:
        raise PipelineError(
            f"rank {transport.rank} is at {_format_place(mine)}; rank {ordered[0][0]} is at {_format_place(step)}: "
            f"{_CALL_ALIKE}"
        )
    _of_replicas(transport, step, wrong, frozen)
    text = repr((samples, step[2] == EVALUATE, [word.shapes for _, word in ordered]))
    return samples, hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def agree_on_call(transport: Transport, step: Moment, readers: Sequence[int]) -> None:
    """All ranks have come to the same call, which reads nothing. Errors are those of `agree_on_batch`."""
    agree_on_batch(transport, Word(step, 0, "") if transport.rank in readers else step, readers)


def _of_readers(words: Sequence[tuple[int, Word]]) -> tuple[int, str]:
    """The samples, and what is wrong with the words of a pipeline, if anything is."""
    try:
        wrong = [f"rank {rank}: {word.wrong}" for rank, word in words if word.wrong]
        if wrong:
            raise Disagreement("; ".join(wrong))
        _require_equal("rank", "is at", [(rank, _format_place(word.step)) for rank, word in words])
        samples = _require_equal(
            "rank",
            "has a batch of",
            [(r, word.samples) for r, word in words if word.samples is not None],
            "give all ranks of a replica the same samples",
        )
        if samples is None:
            raise Disagreement(
                "no tensor of the batch has a first dimension: the samples are the first dimension of each tensor"
            )
        _require_same_samples(words)
    except Disagreement as error:
        return 0, str(error)
    return samples, ""


def _require_same_samples(words: Sequence[tuple[int, Word]]) -> None:
    for (one, word), (other, others) in itertools.combinations(words, 2):
        if word.digest.differs(others.digest):
            raise Disagreement(
                f"rank {one} and rank {other} were given other samples than each other, and the model would train on "
                "the inputs of one with the targets of the other: give all ranks of a replica the same batches in the "
                "same order, as by one seed for whatever shuffles or draws them (torch.manual_seed before the loader "
                "is made); a rank may be given None for what it does not read"
            )


def _of_replicas(transport: Transport, step: Moment, wrong: str, frozen: str) -> None:
    """Else one replica would wait for another that does something else, or has refused its batch."""
    if transport.replicas == 1:
        if wrong:
            raise Disagreement(wrong)
        return
    said = [
        each.decode(errors="ignore")
        for each in transport.alike(f"{'!' if wrong else ''}{wrong or _format_place(step) + frozen}".encode())
    ]
    if any(each.startswith("!") for each in said):
        found = [f"replica {number}: {each[1:]}" for number, each in enumerate(said) if each.startswith("!")]
        raise Disagreement("; ".join(found))
    _require_equal("replica", "is at", list(enumerate(said)))


def _format_place(step: Moment) -> str:
    steps, batches, purpose = step
    return f"{purpose} after {steps} steps" + (f" and {batches} batches" if batches else "")


def _read_inputs(reads: Reads, batch: Any) -> Any:
    if not reads.inputs:
        return {}
    if not isinstance(batch, Mapping | Parts):
        raise PipelineError(
            f"it reads the arguments {', '.join(sorted(reads.inputs))}: the batch must name them, but is "
            f"{'missing' if batch is None else f'a {type(batch).__name__}'}"
        )
    for part in batch if isinstance(batch, Parts) else (batch,):
        if missing := sorted(name for name in reads.inputs if part.get(name) is None):
            raise PipelineError(f"its batch lacks {', '.join(missing)}, which its stages use; it has {', '.join(part)}")
    return select_arguments(batch, reads.inputs)


def _require_equal(who: str, what: str, found: Sequence[tuple[int, T]], advice: str = _CALL_ALIKE) -> T | None:
    if len({value for _, value in found}) > 1:
        places = "; ".join(f"{who} {number} {what} {value}" for number, value in found)
        raise Disagreement(f"{places}: {advice}")
    return found[0][1] if found else None


def _describe_shapes(inputs: Any) -> str:
    structure, tensors = flatten_tensors(inputs)
    return repr((structure, [(tuple(each.shape), str(each.dtype), describe_strides(each)) for each in tensors]))
