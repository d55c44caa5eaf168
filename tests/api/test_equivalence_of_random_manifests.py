"""Whatever is written into the declared fields: the model accepts it exactly if the API server does."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from pydantic import ValidationError

from everstep_operator.api.load import explain_errors
from everstep_operator.api.resources import TRAINING_JOBS, TRAINING_POOLS, CustomResource
from tests.api.conftest import ApiServer
from tests.api.generate import manifests

pytestmark = pytest.mark.integration


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("resource", "examples"), [(TRAINING_JOBS, 150), (TRAINING_POOLS, 60)])
def test_one_verdict(resource: CustomResource, examples: int, api_server: ApiServer) -> None:
    seen: Counter[bool] = Counter()

    @settings(max_examples=examples, suppress_health_check=list(HealthCheck))
    @given(manifests(resource))
    def holds(data: dict[str, Any]) -> None:
        verdict = api_server.judge(data)
        try:
            resource.model.parse(data)
            ours = "accepted"
        except ValidationError as error:
            ours = "; ".join(str(problem) for problem in explain_errors(error, resource))
        seen[verdict.accepted] += 1
        assert verdict.accepted is (ours == "accepted"), f"model: {ours}\nAPI server: {verdict.message or 'accepted'}"

    holds()
    assert min(seen[True], seen[False]) > examples // 10, f"both verdicts must be tried: {seen}"
