"""The documentation keeps its word: links lead somewhere, manifests are valid, named tests exist."""

from __future__ import annotations

import ast
import re
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from everstep_operator.api.load import load_text

ROOT = Path(__file__).parents[2]
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"])
TEST_NAME = re.compile(r"`((?:tests|e2e)/[\w/]+\.py)::(\w+)`")
LUA = ROOT / "docs" / "how-to" / "argo-cd-health.lua"


def identify(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@cache
def defined(file: Path) -> set[str]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return {node.name for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, kinds)}


@pytest.mark.parametrize("page", PAGES, ids=identify)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), target
        assert not anchor or anchor in anchors(found), target


@pytest.mark.parametrize("page", PAGES, ids=identify)
def test_tests_that_are_named_exist(page: Path) -> None:
    for file, name in TEST_NAME.findall(page.read_text()):
        assert (ROOT / file).exists(), file
        assert name in defined(ROOT / file), f"{file}::{name}"


@pytest.mark.parametrize("page", PAGES, ids=identify)
def test_manifests_are_valid(page: Path) -> None:
    for block in blocks(page, "yaml"):
        load_text(block, identify(page))


def test_every_value_that_is_documented_exists() -> None:
    defaults = yaml.safe_load((ROOT / "charts" / "everstep" / "values.yaml").read_text())
    page = (ROOT / "docs" / "how-to" / "install-with-helm.md").read_text()
    for name in re.findall(r"^\| `([\w.]+)`", page, re.MULTILINE):
        value: Any = defaults
        for part in name.split("."):
            assert part in value, name
            value = value[part]


def test_the_crds_are_as_small_as_the_readme_says() -> None:
    told = re.search(r"CRDs of less than (\d+) KB together", (ROOT / "README.md").read_text())
    assert told is not None
    assert sum(len(f.read_bytes()) for f in (ROOT / "crds").glob("*.yaml")) < int(told[1]) * 1000


def test_the_readmes_first_job_runs_in_the_image_that_it_has_built_and_pushed() -> None:
    section = (ROOT / "README.md").read_text().partition("## On your cluster")[2].partition("\n## ")[0]
    command = re.search(r"(sed .*trainingjob\.yaml) \| kubectl apply -f -", section)
    assert command is not None
    applied = subprocess.run(["sh", "-c", command[1]], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    (block,) = re.findall(r"```yaml\n(.*?)```", section, re.DOTALL)
    assert yaml.safe_load(applied) == yaml.safe_load(block)
    image = yaml.safe_load(applied)["spec"]["image"]
    assert re.search(rf"docker build .* -t {re.escape(image)} \.\n", section)
    assert f"docker push {image}\n" in section


def test_the_page_shows_the_lua_that_is_shipped() -> None:
    (shown,) = blocks(ROOT / "docs" / "how-to" / "argo-cd.md", "lua")
    assert shown == LUA.read_text()


@pytest.mark.parametrize(
    ("phase", "health"),
    [
        (None, "Progressing"),
        ("Pending", "Progressing"),
        ("Restarting", "Progressing"),
        ("Running", "Healthy"),
        ("Succeeded", "Healthy"),
        ("Failed", "Degraded"),
        ("Suspended", "Suspended"),
    ],
)
def test_argo_cd_s_health_follows_the_phase(phase: str | None, health: str) -> None:
    assert judged({"phase": phase, "observedGeneration": 1}) == health


def test_argo_cd_waits_until_the_operator_has_seen_a_change() -> None:
    assert judged({"phase": "Running", "observedGeneration": 1}, generation=2) == "Progressing"


def test_a_stalled_job_is_degraded_for_argo_cd() -> None:
    stalled = {"type": "Stalled", "status": "True", "reason": "NameConflict", "message": "m"}
    assert judged({"phase": "Pending", "observedGeneration": 1, "conditions": [stalled]}) == "Degraded"


def judged(status: dict[str, Any], generation: int = 1) -> str:
    """Return the verdict of the Lua script, run as Argo CD runs it: with the object in `obj`."""
    lupa: Any = pytest.importorskip("lupa", reason="no Lua: run with `uv run --with lupa pytest tests/docs`")
    lua = lupa.LuaRuntime()
    conditions = [lua.table_from(each) for each in status.get("conditions", [])]
    table = lua.table_from(
        {**{k: v for k, v in status.items() if v is not None}, "conditions": lua.table_from(conditions)}
    )
    lua.globals().obj = lua.table_from({"metadata": lua.table_from({"generation": generation}), "status": table})
    return str(lua.execute(LUA.read_text()).status)


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.stem.lower() != "changelog"] + [ROOT / "README.md"], ids=identify
)
def test_lines_of_prose_wrap_at_120(page: Path) -> None:
    text = page.read_text()
    if text.startswith("<!-- Generated"):
        return
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    assert [line for line in prose.splitlines() if len(line) > 120 and not line.startswith("|")] == []
