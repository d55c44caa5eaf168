"""The options of a pipeline: what belongs together is one dataclass, and a misplaced keyword is told its place."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from everstep.keywords import explain_keywords
from everstep.pipeline import EngineOptions, LayoutOptions, PlanOptions
from everstep.pipeline.errors import PipelineError

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "pipelines.md").read_text()


@explain_keywords(plan=PlanOptions, engine=EngineOptions)
def call(stages: int, *, plan: PlanOptions | None = None, engine: EngineOptions | None = None) -> int:
    """Return what was given."""
    return stages


@pytest.mark.parametrize(
    ("keyword", "says"),
    [
        ("clip", r"call\(\) has no keyword 'clip': give it as engine=EngineOptions\(clip=…\)"),
        ("memory", r"call\(\) has no keyword 'memory': give it as plan=PlanOptions\(memory=…\)"),
        ("plan_file", r"call\(\) has no keyword 'plan_file': give it as plan=PlanOptions\(file=…\)"),
        ("clipp", r"got an unexpected keyword argument 'clipp'"),
    ],
)
def test_a_keyword_of_a_group_is_told_where_it_belongs(keyword: str, says: str) -> None:
    given: dict[str, Any] = {keyword: 1.0}
    with pytest.raises(TypeError, match=says):
        call(2, **given)


def test_a_function_with_explained_keywords_is_the_same_to_its_callers() -> None:
    assert call(2, plan=PlanOptions(memory=8)) == 2
    assert list(inspect.signature(call).parameters) == ["stages", "plan", "engine"]
    assert call.__doc__ == "Return what was given."


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"precision": "bf8"}, "precision is one of full, bf16, fp16, not 'bf8'"),
        ({"clip": 0.0}, "clip is a norm above 0, not 0.0"),
        ({"heartbeat": 0.0}, "heartbeat is a time in seconds above 0, not 0.0"),
        ({"timeout": -1.0}, "timeout is a time in seconds above 0, not -1.0"),
        ({"bucket": 0}, "bucket at least 1 byte"),
        ({"unsplit_inputs": "scale"}, "unsplit_inputs is a set of names, not the text 'scale': give {'scale'}"),
    ],
)
def test_an_option_that_cannot_be_is_refused_where_it_is_made(given: dict[str, Any], says: str) -> None:
    with pytest.raises(PipelineError, match=says):
        EngineOptions(**given)


def test_stages_recompute_all_or_by_number() -> None:
    stages = range(3)
    assert [EngineOptions(recompute=True).recomputes(each) for each in stages] == [True, True, True]
    assert [EngineOptions(recompute=[1]).recomputes(each) for each in stages] == [False, True, False]
    assert [EngineOptions().recomputes(each) for each in stages] == [False, False, False]


@pytest.mark.parametrize("group", [LayoutOptions, PlanOptions, EngineOptions])
def test_the_page_names_every_option(group: type[Any]) -> None:
    (row,) = re.findall(rf"^\| `\w+={group.__name__}\(…\)` \| .* \| (.*) \|$", PAGE, re.MULTILINE)
    assert re.findall(r"`(\w+)`", row) == [each.name for each in fields(group)]
