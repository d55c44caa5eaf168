"""A certificate authority, the certificates it signs and the kubeconfigs that carry them."""

from __future__ import annotations

import base64
import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from e2e.cluster.errors import ClusterError
from e2e.cluster.state import write_atomically

VALID_DAYS = "365"
# The system's openssl.cnf makes every self-signed certificate an authority; this one says nothing of its own.
CONFIGURATION = "[req]\ndistinguished_name = name\n[name]\n"


@dataclass(frozen=True)
class KeyPair:
    certificate: Path
    key: Path


class Authority:
    """A certificate authority in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.own = KeyPair(folder / "ca.crt", folder / "ca.key")
        self._configuration = folder / "openssl.cnf"

    def create(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._configuration.write_text(CONFIGURATION)
        self._request(self.own, "/CN=everstep-cluster", ["basicConstraints=critical,CA:TRUE"], [])

    def issue(self, name: str, subject: str, alternative_names: Sequence[str] = ()) -> KeyPair:
        """Sign a certificate for client and server use; ``subject`` reads like ``/O=system:nodes/CN=system:node:n``."""
        pair = KeyPair(self.folder / f"{name}.crt", self.folder / f"{name}.key")
        extensions = ["basicConstraints=CA:FALSE", "extendedKeyUsage=serverAuth,clientAuth"]
        if alternative_names:
            extensions.append("subjectAltName=" + ",".join(alternative_names))
        authority = ["-CA", str(self.own.certificate), "-CAkey", str(self.own.key)]
        self._request(pair, subject, extensions, authority)
        return pair

    def kubeconfig(self, path: Path, server: str, pair: KeyPair) -> Path:
        """Write a kubeconfig that needs no other file."""
        cluster = {"server": server, "certificate-authority-data": _encoded(self.own.certificate)}
        user = {"client-certificate-data": _encoded(pair.certificate), "client-key-data": _encoded(pair.key)}
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "everstep", "cluster": cluster}],
            "users": [{"name": "everstep", "user": user}],
            "contexts": [{"name": "everstep", "context": {"cluster": "everstep", "user": "everstep"}}],
            "current-context": "everstep",
        }
        write_atomically(path, json.dumps(document, indent=1))
        path.chmod(0o600)
        return path

    def _request(self, pair: KeyPair, subject: str, extensions: Sequence[str], authority: Sequence[str]) -> None:
        added = [part for extension in extensions for part in ("-addext", extension)]
        command = ["openssl", "req", "-x509", "-config", str(self._configuration), "-days", VALID_DAYS, "-nodes"]
        command += ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-subj", subject, *added, *authority]
        command += ["-keyout", str(pair.key), "-out", str(pair.certificate)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise ClusterError(f"openssl could not make {pair.certificate.name}: {result.stderr.strip()}")


def _encoded(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()
