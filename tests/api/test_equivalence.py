"""The model and a real API server give the same verdict on the same manifest, in the same words."""

from __future__ import annotations

import pytest

from everstep_operator.api.resources import RESOURCES
from tests.api.conftest import ApiServer
from tests.api.tables import Case, cases, manifest

pytestmark = pytest.mark.integration

BY_KIND = {resource.kind: resource for resource in RESOURCES}


@pytest.mark.parametrize("case", cases("valid"))
def test_api_server_accepts_and_stores_what_the_model_sees(case: Case, api_server: ApiServer) -> None:
    data = manifest(case)
    verdict = api_server.judge(data)
    assert verdict.accepted, verdict.message
    stored = verdict.stored["spec"]
    assert {key: stored[key] for key in case.get("stored", {})} == case.get("stored", {})
    model = BY_KIND[data["kind"]].model
    # The defaults of the schema and those of the model are the same ones; a name may be generated.
    assert model.parse(verdict.stored).manifest()["spec"] == model.parse(data).manifest()["spec"]


@pytest.mark.parametrize("case", cases("invalid"))
def test_api_server_refuses_and_says_why(case: Case, api_server: ApiServer) -> None:
    verdict = api_server.judge(manifest(case))
    assert not verdict.accepted
    assert case["says"] in verdict.message


@pytest.mark.parametrize("case", cases("update"))
def test_api_server_judges_updates(case: Case, api_server: ApiServer) -> None:
    verdict = api_server.judge_update(manifest(case, "old"), manifest(case, "new"))
    assert verdict.accepted is ("says" not in case), verdict.message
    assert case.get("says", "") in verdict.message
