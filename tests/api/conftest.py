"""A real API server that knows our resources, and the one question the tests put to it: would you take this?"""

from __future__ import annotations

import base64
import http.client
import json
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from e2e.cluster.controlplane import ControlPlane
from e2e.cluster.waiting import until
from everstep_operator.api.crdgen import build_crd
from everstep_operator.api.meta import API_VERSION
from everstep_operator.api.resources import RESOURCES, TRAINING_POOLS

NAMESPACE = "default"


@dataclass(frozen=True)
class Verdict:
    """The API server's answer to a manifest."""

    accepted: bool
    message: str
    stored: dict[str, Any]
    """The object with its defaults, if accepted."""


class ApiServer:
    """One keep-alive connection to a kube-apiserver."""

    def __init__(self, kubeconfig: Path) -> None:
        config = json.loads(kubeconfig.read_text())
        cluster, user = config["clusters"][0]["cluster"], config["users"][0]["user"]
        context = ssl.create_default_context(cadata=_decoded(cluster["certificate-authority-data"]))
        pair = kubeconfig.with_name("test-client.pem")
        pair.write_text(_decoded(user["client-certificate-data"]) + _decoded(user["client-key-data"]))
        context.load_cert_chain(pair)
        host = cluster["server"].removeprefix("https://")
        self._connection = http.client.HTTPSConnection(host, context=context, timeout=30)

    def request(self, method: str, path: str, body: Any = None, accept: str = "application/json") -> tuple[int, Any]:
        """Status and decoded answer."""
        data = None if body is None else json.dumps(body)
        headers = {"Content-Type": "application/json", "Accept": accept}
        self._connection.request(method, path, body=data, headers=headers)
        answer = self._connection.getresponse()
        return answer.status, json.loads(text) if (text := answer.read()).startswith(b"{") else text.decode()

    def install(self) -> None:
        """Create the CRDs and wait until they are served. A rule over the cost budget fails here."""
        for resource in RESOURCES:
            path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
            code, answer = self.request("POST", path, build_crd(resource))
            assert code == http.client.CREATED, answer["message"]
        until(lambda: all(self._served(resource.plural) for resource in RESOURCES), "the resources are served", 30)

    def _served(self, plural: str) -> bool:
        code, _ = self.request("GET", f"/apis/{API_VERSION}/{plural}")
        return code == http.client.OK

    def judge(self, manifest: dict[str, Any]) -> Verdict:
        """A create as dry run with strict field validation."""
        code, answer = self.request("POST", f"{collection(manifest)}?dryRun=All&fieldValidation=Strict", manifest)
        return _verdict(code, answer)

    def judge_update(self, old: dict[str, Any], new: dict[str, Any]) -> Verdict:
        """Create ``old``, replace it by ``new`` as dry run, delete it."""
        path = collection(old)
        code, answer = self.request("POST", path, old)
        assert code == http.client.CREATED, answer["message"]
        head = {"resourceVersion": answer["metadata"]["resourceVersion"]}
        try:
            changed = {**new, "metadata": {**new["metadata"], **head}}
            name = new["metadata"]["name"]
            return _verdict(*self.request("PUT", f"{path}/{name}?dryRun=All&fieldValidation=Strict", changed))
        finally:
            self.request("DELETE", f"{path}/{old['metadata']['name']}")


def collection(manifest: dict[str, Any]) -> str:
    """The path of the manifest's resource."""
    if manifest.get("kind") == TRAINING_POOLS.kind:
        return f"/apis/{API_VERSION}/{TRAINING_POOLS.plural}"
    return f"/apis/{API_VERSION}/namespaces/{NAMESPACE}/trainingjobs"


def _verdict(code: int, answer: dict[str, Any]) -> Verdict:
    if code in (http.client.OK, http.client.CREATED):
        return Verdict(True, "", answer)
    assert code in (http.client.BAD_REQUEST, http.client.UNPROCESSABLE_ENTITY), answer
    return Verdict(False, answer["message"], {})


def _decoded(text: str) -> str:
    return base64.b64decode(text).decode()


@pytest.fixture(scope="session")
def api_server() -> Iterator[ApiServer]:
    with ControlPlane() as control_plane:
        server = ApiServer(control_plane.kubeconfig)
        server.install()
        yield server
