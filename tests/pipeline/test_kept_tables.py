"""Tables by sizes that code keeps beside its modules, and can do without."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from everstep.pipeline.errors import PipelineError  # noqa: E402
from everstep.pipeline.frontend.trace import trace_model  # noqa: E402

pytestmark = pytest.mark.torch


class Model(nn.Module):  # type: ignore[misc]  # torch is not where types are checked
    """Two layers, and code of the model's own between them."""

    def __init__(self, code: Callable[[Any], Any]) -> None:
        super().__init__()
        self.one, self.two, self.code = nn.Linear(4, 4), nn.Linear(4, 4), code

    def forward(self, x: Any) -> Any:
        return self.two(self.code(self.one(x)))


def test_code_that_can_do_without_its_table_takes_any_size() -> None:
    # Made here, since tests freeze what there is at their begin (gc.freeze).
    positions = functools.cache(lambda length: torch.arange(length))
    remembered = functools.cache(lambda shape: tuple(shape))

    def folded(x: Any) -> Any:  # as einops, which does so for torch.compile
        try:
            shape = remembered(x.shape)
        except TypeError:
            shape = tuple(x.shape)
        return x.flatten(1).reshape(shape)

    example = torch.ones(3, 5, 4)
    found = trace_model(Model(folded), example)
    assert {dim for (_, _, dim), _ in found.sizes.numbers} == {2}  # the features of a layer
    beside = trace_model(Model(lambda x: folded(x) + positions(x.shape[1])[:, None]), example).sizes
    beside.check({"x": torch.ones(2, 5, 4)})
    with pytest.raises(PipelineError, match="is 7, and was 5 in the example"):
        beside.check({"x": torch.ones(3, 7, 4)})
