"""kubectl, as the cluster's own code uses it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from e2e.cluster.binaries import binary
from e2e.cluster.errors import ClusterError

Object = dict[str, Any]


@dataclass(frozen=True)
class Kubectl:
    kubeconfig: Path
    timeout: float = 180

    def run(self, *arguments: str, stdin: str | None = None) -> str:
        """Standard output; a ClusterError with what kubectl said when it fails."""
        command = [str(binary("kubectl")), "--kubeconfig", str(self.kubeconfig), *arguments]
        try:
            result = subprocess.run(
                command, input=stdin, capture_output=True, text=True, timeout=self.timeout, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise ClusterError(f"kubectl {' '.join(arguments[:3])} did not end in {self.timeout:g} s") from error
        if result.returncode != 0:
            raise ClusterError(f"kubectl {' '.join(arguments[:3])}: {result.stderr.strip()}")
        return result.stdout

    def items(self, kind: str, *arguments: str) -> list[Object]:
        return list(json.loads(self.run("get", kind, "-o", "json", *arguments))["items"])

    def apply(self, objects: Sequence[Object]) -> None:
        document = {"apiVersion": "v1", "kind": "List", "items": list(objects)}
        self.run("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=json.dumps(document))


def is_ready(node: Object) -> bool:
    """Return whether a node's Ready condition is true."""
    conditions = node.get("status", {}).get("conditions", [])
    return any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)
