"""The table of what a trace takes from its example and from its moment says what becomes of each, however it is cut."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("numpy")

from everstep.pipeline import EngineOptions, PlanOptions, pipeline  # noqa: E402
from everstep.pipeline.errors import PipelineError  # noqa: E402
from everstep.pipeline.frontend.trace import trace_model  # noqa: E402
from tests.checkpoint import ranks  # noqa: E402
from tests.pipeline.traced_classes import CHANGED, CLASSES, STEPS, Case  # noqa: E402

pytestmark = pytest.mark.torch

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "pipeline-rules.md"
SECTION = "## What a trace takes"
REJECTED = f"rejected in step {CHANGED}"
NAMES = [(treated, name) for treated, cases in CLASSES.items() for name in cases]

Trained = tuple[float, dict[str, Any]]  # the loss of a step, and its gradients


def squares(output: Any, targets: Any) -> Any:
    return (output.flatten(1).mean(1) - targets).square().mean() + output.flatten(1).square().mean(1).mean()


def targets_of(step: int) -> Any:
    return torch.linspace(-1.0, 1.0, 4, dtype=torch.float64) + step


def finish(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the gradients of a step that do anything, and learn from them."""
    found = {name: each.grad.clone() for name, each in parameters.items() if each.grad is not None and each.grad.any()}
    with torch.no_grad():
        for each in parameters.values():
            if each.grad is not None:
                each -= 0.05 * each.grad
                each.grad = None
    return found


def train_alone(case: Case) -> list[Trained]:
    torch.manual_seed(0)
    model, found = case.build(), list[Trained]()
    for step in range(STEPS):
        case.change(step, model)
        loss = squares(model(**case.batch(step)), targets_of(step))
        loss.backward()
        found.append((float(loss), finish(dict(model.named_parameters()))))
    return found


def iterate_cuts(case: Case) -> Iterator[dict[str, int]]:
    """One stage, two of about as many nodes, and a stage for all that can be one."""
    torch.manual_seed(0)
    case.change(0, model := case.build())
    nodes = trace_model(model, case.batch(0)).graph.nodes
    groups = [node.colocate or node.name for node in nodes]
    places = [at for at in range(1, len(nodes)) if set(groups[:at]).isdisjoint(groups[at:])]
    for chosen in ([], places[len(places) // 2 :][:1], places):
        yield {node.name: sum(at >= place for place in chosen) for at, node in enumerate(nodes)}


def train_in_stages(case: Case, stage_of: dict[str, int], alone: list[Trained]) -> str:
    """Say whether all steps are those of one process, or where something was rejected."""
    torch.manual_seed(0)
    case.change(0, model := case.build())
    plan, engine = PlanOptions(stage_of=stage_of, costs="counted"), EngineOptions(heartbeat=None)
    stages, step = max(stage_of.values()) + 1, -1
    try:
        with pipeline(
            model, case.batch(0), squares, targets=targets_of(0), stages=stages, microbatches=case.micro,
            plan=plan, engine=engine,
        ) as run:  # fmt: skip
            for step in range(STEPS):
                case.change(step, model)
                loss = run.step(case.batch(step), targets_of(step)).loss
                wanted, gradients = alone[step]
                found = finish(dict(run.named_parameters()))
                if loss != pytest.approx(wanted, rel=1e-10) or found.keys() != gradients.keys():
                    return "other"
                if not all(torch.allclose(each, gradients[name], rtol=1e-9) for name, each in found.items()):
                    return "other"
    except PipelineError:
        return "rejected at the call" if step < 0 else f"rejected in step {step}"
    return "same"


def _outcomes_of(rank: int, treated: str, name: str) -> list[str]:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    case = CLASSES[treated][name]
    try:
        cuts = list(iterate_cuts(case))
    except PipelineError:
        return ["rejected at the call"]
    alone = train_alone(case)
    return [train_in_stages(case, each, alone) for each in cuts]


@pytest.mark.parametrize(("treated", "name"), NAMES)
def test_each_class_is_treated_as_the_table_says(treated: str, name: str) -> None:
    outcomes = ranks.run(1, _outcomes_of, treated, name)[0]
    wanted = {
        "followed": [{"same"}],
        "checked": [{REJECTED}, {REJECTED, "same"}],
        "rejected": [{"rejected at the call"}, {"rejected at the call", "same"}],
        "not seen": [{"other"}, {"other", "same"}],
    }
    assert set(outcomes) in wanted[treated], outcomes


def test_the_table_has_these_rows() -> None:
    _, _, rest = PAGE.read_text(encoding="utf-8").partition(SECTION)
    table = rest.partition("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \| (followed|checked|rejected|not seen)\b.*\|$", table, re.MULTILINE)
    assert [(treated, name) for name, treated in rows] == NAMES
