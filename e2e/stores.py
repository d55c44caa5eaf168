"""An S3 store that a cluster's pods reach: versitygw on this machine, as the tests of the library have it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from e2e.cluster.network import HOST_ADDRESS
from e2e.harness import Object
from tests.checkpoint.s3_server import BUCKET, ENVIRONMENT, s3_server

SECRET = "s3-credentials"


@dataclass(frozen=True)
class PodStore:
    """A store, and the Secret with which pods open it; `folder` has its objects as files."""

    endpoint: str
    folder: Path

    def secret(self) -> Object:
        """Return the Secret whose keys are the variables of an S3 client."""
        keys = {name: ENVIRONMENT[name] for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION")}
        data = {**keys, "AWS_ENDPOINT_URL": self.endpoint}
        return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": SECRET}, "stringData": data}

    def policy(self, prefix: str, **more: object) -> Object:
        """Return `spec.checkpoint` of a job that saves below this prefix."""
        return {"store": f"s3://{BUCKET}/{prefix}", "secretRef": {"name": SECRET}, **more}

    def newest_step(self, prefix: str) -> int:
        """Return the greatest step of the checkpoints that are committed below this prefix; 0 where there is none."""
        names = (path.stem for path in (self.folder / prefix / "manifests").glob("*.json"))
        return max((int(name.rpartition("-")[2]) for name in names), default=0)


@contextmanager
def pod_store(folder: Path) -> Iterator[PodStore]:
    """Run a store on the address at which pods of a local cluster reach this machine. Ends with the block."""
    with s3_server(folder, HOST_ADDRESS) as server:
        yield PodStore(server.endpoint, server.folder)
