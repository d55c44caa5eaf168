"""The examples' manifests are valid jobs whose scripts exist."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.images.catalogue import images
from tests.examples.conftest import EXAMPLES

MANIFESTS = sorted(EXAMPLES.glob("*/trainingjob*.yaml"))
IN_IMAGE = {"/opt/everstep/examples/": "", "/app/": "byo/"}


def load(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(path.read_text())
    return loaded


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: str(path.relative_to(EXAMPLES)))
def test_the_api_accepts_it(path: Path) -> None:
    job = pytest.importorskip("everstep_operator.api.job")
    job.TrainingJob.model_validate(load(path))


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: str(path.relative_to(EXAMPLES)))
def test_its_image_is_built_here_and_its_script_exists(path: Path) -> None:
    spec = load(path)["spec"]
    assert f"docker.io/{spec['image']}" in {image.name for image in images()}
    program = spec["command"][-1]
    prefix = next(prefix for prefix in IN_IMAGE if program.startswith(prefix))
    source = EXAMPLES / (IN_IMAGE[prefix] + program.removeprefix(prefix))
    assert source.exists() or source.with_suffix(".c").exists()


def test_each_example_has_a_manifest_a_readme_and_a_name_of_its_own() -> None:
    folders = {path.parent for path in MANIFESTS}
    assert folders == {path for path in EXAMPLES.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert all((folder / "README.md").exists() for folder in folders)
    names = [load(path)["metadata"]["name"] for path in MANIFESTS]
    assert len(names) == len(set(names))
