"""An admission webhook: a server of its own with TLS, which the API server asks."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from e2e.cluster.controlplane import ControlPlane
from e2e.cluster.ports import free_ports
from everstep_operator.cluster import errors
from everstep_operator.cluster.resources import CONFIG_MAPS, ApiResource
from tests.integration.world import World, until

_GROUP = "admissionregistration.k8s.io"
VALIDATING = ApiResource(
    _GROUP, "v1", "validatingwebhookconfigurations", "ValidatingWebhookConfiguration", namespaced=False
)
MUTATING = ApiResource(_GROUP, "v1", "mutatingwebhookconfigurations", "MutatingWebhookConfiguration", namespaced=False)
PROBE = "everstep-probe"
Review = Mapping[str, Any]


@dataclass
class Webhook:
    """A webhook of `kind` for new pods of one namespace. `answer` makes the response; None: it never answers."""

    plane: ControlPlane
    world: World
    kind: ApiResource
    answer: Callable[[Review], Mapping[str, Any] | None]
    timeout_seconds: int = 1
    asked: list[str] = field(default_factory=list)  # the names of objects

    @property
    def name(self) -> str:
        return f"{self.world.namespace}.example.com"

    async def __aenter__(self) -> Webhook:
        pair = self.plane.authority.issue(self.name, "/CN=webhook", ["IP:127.0.0.1"])
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(str(pair.certificate), str(pair.key))
        application = web.Application(client_max_size=1 << 24)
        application.router.add_post("/", self._answer)
        self._runner = web.AppRunner(application, shutdown_timeout=0.1, access_log=None)
        await self._runner.setup()
        (port,) = free_ports(1)
        await web.TCPSite(self._runner, "127.0.0.1", port, ssl_context=context).start()
        authority = base64.b64encode(self.plane.authority.own.certificate.read_bytes()).decode()
        webhook = {
            "name": self.name,
            "clientConfig": {"url": f"https://127.0.0.1:{port}/", "caBundle": authority},
            "rules": [
                {
                    "operations": ["CREATE"],
                    "apiGroups": [""],
                    "apiVersions": ["v1"],
                    "resources": ["pods", "configmaps"],
                }
            ],
            "failurePolicy": "Fail",
            "sideEffects": "None",
            "admissionReviewVersions": ["v1"],
            "timeoutSeconds": self.timeout_seconds,
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": self.world.namespace}},
        }
        body = {"apiVersion": f"{_GROUP}/v1", "kind": self.kind.kind, "metadata": {"name": self.name}}
        await self.world.client.create(self.kind, None, {**body, "webhooks": [webhook]})
        await until(self._is_asked, "the API server asks the webhook")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.world.client.delete(self.kind, None, self.name, uid=None)
        await self._runner.cleanup()

    async def _is_asked(self) -> bool:
        """The API server takes a moment to learn of it. Only what is no pod may be tried meanwhile."""
        probe = {"metadata": {"name": PROBE}}
        with contextlib.suppress(errors.ApiError, errors.Unreachable):
            await self.world.client.create(CONFIG_MAPS, self.world.namespace, probe, dry_run=True)
        return PROBE in self.asked

    async def _answer(self, request: web.Request) -> web.Response:
        asked = json.loads(await request.read())["request"]
        name = str((asked.get("object") or {}).get("metadata", {}).get("name"))
        self.asked.append(name)
        said = self.answer(asked) if asked["resource"]["resource"] == "pods" else {"allowed": True}
        if said is None:
            await asyncio.Event().wait()
        review = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview"}
        return web.json_response({**review, "response": {"uid": asked["uid"], **(said or {})}})


def allow(*changes: Mapping[str, Any]) -> dict[str, Any]:
    """Allow an object, with these operations of a JSON patch."""
    if not changes:
        return {"allowed": True}
    patch: Sequence[Mapping[str, Any]] = list(changes)
    return {"allowed": True, "patchType": "JSONPatch", "patch": base64.b64encode(json.dumps(patch).encode()).decode()}
