"""The chart, rendered by a real `helm`."""

from __future__ import annotations

import copy
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "everstep"

Objects = list[dict[str, Any]]
Render = Callable[..., Objects]


@pytest.fixture(scope="session")
def helm() -> Callable[..., subprocess.CompletedProcess[str]]:
    path = shutil.which("helm")
    if path is None:
        from e2e.cluster.binaries import binary

        path = str(binary("helm"))

    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([path, *arguments], capture_output=True, text=True, check=False, cwd=ROOT)

    return call


@pytest.fixture(scope="session")
def template(
    helm: Callable[..., subprocess.CompletedProcess[str]], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`helm template` with these top-level values."""
    file = tmp_path_factory.mktemp("chart") / "values.yaml"

    def call(**values: object) -> subprocess.CompletedProcess[str]:
        file.write_text(yaml.safe_dump(values))
        return helm("template", "everstep", str(CHART), "--namespace", "everstep-system", "--values", str(file))

    return call


@pytest.fixture(scope="session")
def render(template: Callable[..., subprocess.CompletedProcess[str]]) -> Render:
    """The objects that the chart makes of these top-level values; rendered once for each set of values."""
    rendered: dict[str, Objects] = {}

    def call(**values: object) -> Objects:
        key = yaml.safe_dump(values)
        if key not in rendered:
            result = template(**values)
            assert result.returncode == 0, result.stderr
            rendered[key] = [each for each in yaml.load_all(result.stdout, Loader=yaml.CSafeLoader) if each]
        return copy.deepcopy(rendered[key])

    return call
