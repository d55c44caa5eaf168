"""Every name of the page's table is there, or refused when it is used."""

from __future__ import annotations

import re
import types
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.torch
pytest.importorskip("torch")

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "sagemaker-model-parallel.md"
ROWS = re.findall(r"^\| `smp\.([\w.]+)` \| (supported|refused) \|", PAGE.read_text(), re.MULTILINE)


def found(name: str) -> Any:
    from everstep.compat.smdistributed.modelparallel import torch as smp

    return reduce(getattr, name.split("."), smp)


@pytest.mark.parametrize(("name", "told"), ROWS)
def test_a_name_is_there_or_refused_as_the_table_says(name: str, told: str) -> None:
    from everstep.compat.smdistributed.modelparallel.torch import NotOffered

    if told == "supported":
        assert found(name) is not None
    elif name.startswith(("StepOutput.", "DistributedModel.")):
        with pytest.raises(NotOffered, match=re.escape(name)):
            found(name)(object())
    else:
        with pytest.raises(NotOffered, match=re.escape(name)):
            found(name)()


def test_everything_that_is_offered_is_in_the_table() -> None:
    from everstep.compat.smdistributed.modelparallel import torch as smp

    own = {
        "NotInitialized",
        "NotOffered",
        "shutdown",
        "WORLD",
        "MP_GROUP",
        "DP_GROUP",
        "PP_GROUP",
        "TP_GROUP",
        "RDP_GROUP",
    }
    assert set(smp.__all__) - own <= {name.split(".")[0] for name, _ in ROWS}


def test_a_refused_layer_cannot_be_derived_from() -> None:
    from everstep.compat.smdistributed.modelparallel.torch import NotOffered, nn

    with pytest.raises(NotOffered, match="tensor parallelism"):
        types.new_class("Own", (nn.DistributedLinear,))


def test_names_before_init_say_so() -> None:
    from everstep.compat.smdistributed.modelparallel import torch as smp

    with pytest.raises(smp.NotInitialized, match=r"call smp.init\(\) first"):
        smp.rank()
