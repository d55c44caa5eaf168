"""A real S3 server on a folder, for tests: versitygw, built from its Go module and cached like a cluster's programs."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from e2e.cluster import binaries

BUCKET = "checkpoints"

# What a client finds in its environment; nothing of the machine's own settings counts.
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "everstep",
    "AWS_SECRET_ACCESS_KEY": "everstep-secret",
    "AWS_REGION": "us-east-1",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    "AWS_EC2_METADATA_DISABLED": "true",
}


@dataclass(frozen=True)
class S3Server:
    """`port` on this machine; the bucket's objects are files below `folder`, to look at and to damage."""

    port: int
    folder: Path
    address: str = "127.0.0.1"

    @property
    def endpoint(self) -> str:
        return f"http://{self.address}:{self.port}"

    def url(self, prefix: str, endpoint: str | None = None) -> str:
        return f"s3://{BUCKET}/{prefix}?endpoint={endpoint or self.endpoint}"


@contextmanager
def s3_server(folder: Path, address: str = "127.0.0.1") -> Iterator[S3Server]:
    """Run a server on an address of this machine; it ends with the block."""
    data, metadata = folder / "data", folder / "metadata"
    # A bucket is a folder. Metadata in a folder of its own: not every file system has extended attributes.
    for path in (data / BUCKET, metadata):
        path.mkdir(parents=True)
    program = binaries.binary("versitygw")
    port = _free_port(address)
    command = [str(program), "--port", f"{address}:{port}", "--quiet", "posix", "--sidecar", str(metadata), str(data)]
    keys = {
        "ROOT_ACCESS_KEY": ENVIRONMENT["AWS_ACCESS_KEY_ID"],
        "ROOT_SECRET_KEY": ENVIRONMENT["AWS_SECRET_ACCESS_KEY"],
    }
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, env={**os.environ, **keys}, stdout=log, stderr=subprocess.STDOUT)
    try:
        _wait_until_it_listens(process, (address, port), folder / "log")
        yield S3Server(port, data / BUCKET, address)
    finally:
        process.kill()
        process.wait()


def _free_port(address: str) -> int:
    with socket.socket() as listener:
        listener.bind((address, 0))
        return int(listener.getsockname()[1])


def _wait_until_it_listens(
    process: subprocess.Popen[bytes], place: tuple[str, int], log: Path, seconds: float = 30
) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection(place, timeout=1).close()
            return
        except OSError:
            if process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"the S3 server did not start:\n{log.read_text()[-2000:]}") from None
            time.sleep(0.02)
