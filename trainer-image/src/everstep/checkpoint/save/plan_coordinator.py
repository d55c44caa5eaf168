"""Rank 0's side of planning: it is given what ranks hold and tells each its own share. No communication, no torch.

Ranks send digests first; what is the same on several ranks is then sent by one of them. So the model under DDP comes
once, and shards come as two integers each.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from everstep.checkpoint.errors import CheckpointError
from everstep.checkpoint.save.layouts import LayoutNames, RankLayout, decode_spans, digest_blob
from everstep.checkpoint.save.value_sums import ADVICE, check_names, check_values
from everstep.checkpoint.save.write_shares import Ints, LayoutGroup, WriteShares, share_writes


@dataclass(frozen=True)
class PlanShare:
    """One rank's share. `writes`: places in its layout; `compares`: places of what others hold too, to be compared."""

    writes: Ints
    compares: Ints
    sizes: tuple[int, ...]
    model: str


class RankMessages:
    """Encode what a rank says while it plans.

    Args:
        layout: What it holds.
        values: The checksum of each plain value that is not its own, by name; as text.
    """

    def __init__(self, layout: RankLayout, values: Mapping[str, str]) -> None:
        self._count = len(layout.tensors.names)
        packed = zlib.compress(json.dumps(values, sort_keys=True, separators=(",", ":")).encode(), 1)
        self._blobs = (*layout.blobs, packed)

    def head(self) -> bytes:
        """Return the first message: digests of what it could send."""
        return pickle.dumps([digest_blob(blob) for blob in self._blobs])

    @staticmethod
    def failure(why: str) -> bytes:
        """Return the first or the last message of a rank that cannot go on."""
        return pickle.dumps(why)

    def details(self, wanted: bytes) -> bytes:
        """Return the second message: what rank 0 wants of it."""
        return pickle.dumps([blob if wants else b"" for blob, wants in zip(self._blobs, wanted, strict=True)])

    def share(self, answer: bytes) -> PlanShare:
        """Its share, from rank 0's answer. CheckpointError when there is no plan."""
        told = pickle.loads(answer)  # noqa: S301 (of our own run, as every collective of objects)
        if isinstance(told, str):
            raise CheckpointError(told)
        writes, compares, sizes, model = told
        return PlanShare(_decode_mask(writes, self._count), _decode_mask(compares, self._count), sizes, model)

    @staticmethod
    def sums(sums: Sequence[int]) -> bytes:
        """Return the third message: checksums (64 bits) of what was to be compared, in order."""
        return pickle.dumps(np.array(sums, np.uint64).tobytes())

    @staticmethod
    def check(verdict: bytes) -> None:
        """Raise CheckpointError when ranks hold different things under one name."""
        if verdict:
            raise CheckpointError(verdict.decode("utf-8", "backslashreplace"))


class PlanCoordinator:
    """Its methods are called one after the other, each with the messages of all ranks in order."""

    def __init__(self) -> None:
        self._heads: list[list[bytes]] = []
        self._shares: WriteShares | None = None
        self._group_of_rank: list[int] = []
        self._failure = ""

    def ask(self, heads: Sequence[bytes]) -> list[bytes]:
        """Return what each rank is to send: each thing comes from the first rank that has it."""
        found = [pickle.loads(head) for head in heads]  # noqa: S301
        failures = [each for each in found if isinstance(each, str)]
        if failures:
            self._failure = "; ".join(failures)
            return [bytes(3)] * len(heads)
        self._heads = found
        seen: tuple[set[bytes], ...] = (set(), set(), set())
        answers = []
        for head in found:
            answers.append(bytes(digest not in known for digest, known in zip(head, seen, strict=True)))
            for digest, known in zip(head, seen, strict=True):
                known.add(digest)
        return answers

    def share(self, details: Sequence[bytes]) -> list[bytes]:
        """Return what each rank writes; the same words to all where there is no plan."""
        if not self._failure:
            try:
                return self._planned(details)
            except CheckpointError as error:
                self._failure = f"the ranks' states do not fit together: {error}"
            except Exception as error:  # the other ranks wait
                self._failure = f"rank 0 cannot plan what each rank writes: {type(error).__name__}: {error}"
        return [pickle.dumps(self._failure)] * len(details)

    def judge(self, sums: Sequence[bytes]) -> list[bytes]:
        """Empty where all replicas are equal, else why not; the same to all."""
        found = [pickle.loads(each) for each in sums]  # noqa: S301
        failures = [each for each in found if isinstance(each, str)]
        words = "; ".join(failures) if failures else self._unequal(found)
        return [words.encode("utf-8", "backslashreplace")] * len(sums)

    def _planned(self, details: Sequence[bytes]) -> list[bytes]:
        blobs: tuple[dict[bytes, bytes], ...] = ({}, {}, {})
        for head, detail in zip(self._heads, details, strict=True):
            for digest, blob, known in zip(head, pickle.loads(detail), blobs, strict=True):  # noqa: S301
                if blob:
                    known[digest] = blob
        values = {digest: json.loads(zlib.decompress(blob)) for digest, blob in blobs[2].items()}
        check_values([values[digest] for _, _, digest in self._heads])
        names = {digest: LayoutNames.decode(blob) for digest, blob in blobs[0].items()}
        shared = {digest: each.list_shared() for digest, each in names.items()}
        check_names([(shared[tensors], values[digest]) for tensors, _, digest in self._heads])
        ranks: dict[tuple[bytes, bytes], list[int]] = {}
        for rank, (tensors, spans, _) in enumerate(self._heads):
            ranks.setdefault((tensors, spans), []).append(rank)
        groups = [
            LayoutGroup(tuple(members), names[tensors], decode_spans(blobs[1][spans]))
            for (tensors, spans), members in ranks.items()
        ]
        shares = self._shares = share_writes(groups)
        self._group_of_rank = [0] * len(details)
        compares = []
        for number, group in enumerate(groups):
            compares.append(_encode_mask(shares.replicas[number][0], len(group.spans)))
            for rank in group.ranks:
                self._group_of_rank[rank] = number
        model = fingerprint_model(shares.kinds)
        answers = []
        for rank, number in enumerate(self._group_of_rank):
            writes = _encode_mask(shares.writes[rank], len(groups[number].spans))
            answers.append(pickle.dumps((writes, compares[number], shares.sizes, model)))
        return answers

    def _unequal(self, found: Sequence[bytes]) -> str:
        shares = self._shares
        assert shares is not None
        count = len(shares.tensor_of_box)
        known, holder = np.zeros(count, np.uint64), np.full(count, -1, np.int32)
        others: dict[int, tuple[int, int]] = {}  # by box: a rank with another sum, and that sum
        for rank, (data, number) in enumerate(zip(found, self._group_of_rank, strict=True)):
            boxes, sums = shares.replicas[number][1], np.frombuffer(data, np.uint64)
            fresh = holder[boxes] < 0
            known[boxes[fresh]], holder[boxes[fresh]] = sums[fresh], rank
            for place in np.flatnonzero(known[boxes] != sums):
                others.setdefault(int(boxes[place]), (rank, int(sums[place])))
        if not others:
            return ""
        tensors = {int(shares.tensor_of_box[box]): box for box in sorted(others, reverse=True)}
        number, box = min(tensors.items())
        rank, differs = others[box]
        more = f" (and {len(tensors) - 1} more tensors)" if len(tensors) > 1 else ""
        return (
            f"{shares.names[number]}{more} differs between ranks that should hold the same: rank {holder[box]} has the "
            f"checksum {int(known[box]):016x}, rank {rank} has {differs:016x}. {ADVICE}"
        )


def fingerprint_model(kinds: Mapping[str, tuple[str, tuple[int, ...]]]) -> str:
    """Return a hash of what a model is: names, dtypes and whole shapes of its tensors, in any order."""
    lines = sorted(f"{name} {dtype} {list(shape)}" for name, (dtype, shape) in kinds.items())
    return hashlib.sha256("\n".join(lines).encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _encode_mask(places: Ints, count: int) -> bytes:
    mask = np.zeros(count, bool)
    mask[places] = True
    return np.packbits(mask).tobytes()


def _decode_mask(mask: bytes, count: int) -> Ints:
    return np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), count=count))
