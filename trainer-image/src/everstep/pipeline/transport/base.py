"""Define what the engine asks of a transport.

Tensors of a directed pair of ranks arrive in the order in which they were sent: the k-th send meets the k-th receive,
and may not complete before that is posted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch


class TransportError(RuntimeError):
    """The ranks do not meet: what one sends is not what the other expects, or one of them is gone."""


class Tag(NamedTuple):
    """The identity of a message, on which both sides must agree. `part` counts the tensors of a nested value."""

    value: str
    microbatch: int
    gradient: bool = False
    part: int = 0

    def __str__(self) -> str:
        what = f"the gradient of {self.value}" if self.gradient else self.value
        return f"{what} (micro-batch {self.microbatch}{f', part {self.part}' if self.part else ''})"


class Spec(NamedTuple):
    """The shape and the dtype of one tensor; `gradient`: whether one comes back for it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    gradient: bool = False
    strides: tuple[int, ...] | None = None  # None if it is contiguous


class Work(Protocol):
    """Something that goes on beside the computation."""

    def wait(self) -> None:
        """Wait until it is done and its tensors may be used again; raise TransportError if it failed."""


class Arrival(Protocol):
    """A tensor on its way here."""

    def wait(self) -> torch.Tensor:
        """The tensor, on this rank's device. TransportError."""


class Exchange(Protocol):
    """An exchange between replicas that is on its way."""

    def done(self) -> bool:
        """Tell whether `wait` returns at once; raise TransportError if the exchange failed."""

    def wait(self) -> list[torch.Tensor]:
        """Return what each replica had for this one, in their order, on this rank's device; raise TransportError if it
        failed."""


class Transport(Protocol):
    """One rank's view. Ranks are those of one pipeline, 0 to size - 1; `replicas` equal pipelines train on parts of
    one batch, and rank r of each is the same part of the model."""

    rank: int
    size: int
    replica: int
    replicas: int
    device: torch.device

    def connect(self, links: Sequence[tuple[int, int]]) -> None:
        """Make ready for tensors between these directed pairs of ranks, in addition to those of earlier calls.

        All ranks of all replicas call it, with the same, before the first of these tensors.
        """

    def send(self, tensor: torch.Tensor, to: int, tag: Tag) -> Work:
        """`tensor` must not change until the work is done."""

    def receive(self, like: Spec, from_: int, tag: Tag) -> Arrival:
        """The next tensor of that rank, which must be of this spec and tag."""

    def tell(self, message: bytes, to: int) -> None:
        """A small message, beside the tensors and in an order of its own; does not wait for the other rank."""

    def hear(self, from_: int) -> bytes:
        """The next message that `from_` told this rank; waits for it."""

    def alike(self, message: bytes) -> list[bytes]:
        """Return what this rank of each replica says, in their order, each cut to 508 bytes.

        All replicas call it. It goes beside the tensors, as `tell` does.
        """

    def group(self, ranks: Sequence[int], *, replicas: bool) -> Any:
        """Return the group of these ranks of this pipeline, or with `replicas` of all pipelines.

        All ranks call it, in the same order.
        """

    def all_reduce(self, tensor: torch.Tensor, group: Any) -> Work:
        """Sum contiguous `tensor` in place over the group, to the same bits on all of its members."""

    def exchange(self, parts: Sequence[torch.Tensor], sizes: Sequence[int], group: Any) -> Exchange:
        """Begin to give each replica its part, and to get theirs.

        Args:
            parts: For each replica of this rank, in their order; tensors of one dimension and one dtype.
            sizes: The numbers that each replica has for this one.
            group: This rank of all replicas.
        """

    def settle(self) -> None:
        """Wait until all that was told has been heard. Called where every rank comes."""

    def abort(self, reason: str) -> None:
        """End what waits on this transport, here, with TransportError(reason); any thread may call it."""
