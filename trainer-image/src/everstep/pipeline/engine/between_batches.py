"""Gradients between the batches of one step, which are sums that nobody has scaled yet.

A step divides by what all of its batches count. A script that clears these gradients in between takes the sums of the
first batches away, and not what they count; one that steps an optimizer steps by sums over micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from everstep.pipeline.errors import PipelineError


class HeldGradients:
    """The gradients that the batches of a step have left, and how often each was written."""

    def __init__(self) -> None:
        self._held: list[tuple[Any, Any, int]] = []

    def hold(self, parameters: Mapping[str, Any]) -> None:
        """Remember the gradients of these parameters, after a batch that does not end its step."""
        self._held = [(each, each.grad, 0 if each.grad is None else each.grad._version) for each in parameters.values()]

    def release(self) -> None:
        """Forget them, before a step begins."""
        self._held = []

    def are_of(self, parameters: Iterable[Any]) -> bool:
        """Tell whether one of these parameters still has the gradient that a batch has left."""
        given = {id(each) for each in parameters}
        return any(
            gradient is not None and id(each) in given and each.grad is gradient for each, gradient, _ in self._held
        )

    def check(self, parameters: Mapping[str, Any]) -> None:
        """Compare them with what the parameters have now.

        Args:
            parameters: The same parameters by their names.

        Raises:
            PipelineError: If one was cleared, replaced or written, with the name of its parameter.
        """
        for parameter, gradient, version in self._held:
            now = parameter.grad
            if now is gradient and (now is None or now._version == version):
                continue
            name = next((name for name, each in parameters.items() if each is parameter), "")
            raise PipelineError(
                f"the gradient of parameter {name!r} was {'cleared' if now is None else 'changed'} between the batches "
                "of one step, as by optimizer.zero_grad(): until the step ends it is a sum, and the step still divides "
                "by what all of its batches count. End a step with step(…, last=True), also with the last batch of an "
                "epoch, and change gradients after it; a step drops the gradients from before it by itself"
            )
