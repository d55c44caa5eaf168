"""The API server, as the operator uses it: plain dictionaries in and out, typed errors, bounded patience.

Built on the asyncio half of the official client (`kubernetes.aio`) for what is hard to get right: kubeconfig, exec
plug-ins, in-cluster tokens that rotate. Its typed models are never constructed: a user's pod template may hold
fields that the pinned version does not know, and a model would drop or refuse them. Nor are its requests made: they
walk through each body to serialize models in it, and log whole answers, Secrets included.

What may be sent twice: reads, deletes with a UID precondition, status applied with a resourceVersion, dry runs.
A create may not, once its result is unknown: `Unreachable.sent` goes up to the caller, who reads before writing again.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NamedTuple

import aiohttp
import structlog
import tenacity
from kubernetes.aio import config as kubernetes_config
from kubernetes.aio.client import Configuration

from everstep_operator import metrics
from everstep_operator.cluster import errors
from everstep_operator.cluster.api_session import open_api_session
from everstep_operator.cluster.resources import LEASES, ApiResource
from everstep_operator.cluster.server_clock import ServerClock

log = structlog.get_logger(__name__)

ApiObject = dict[str, Any]


class ListPage(NamedTuple):
    items: list[ApiObject]
    version: int  # the state that all pages of this list show


FIELD_MANAGER = "everstep-operator"
_ATTEMPTS = 5
_RETRY_AFTER_MAX = 30.0
# Objects on one page of a list. Whoever may create them decides how large they are, up to 1.5 MiB each.
PAGE = 100
_JSON = "application/json"
_APPLY = "application/apply-patch+yaml"  # JSON is YAML, and every server with server-side apply knows this type
_MERGE = "application/merge-patch+json"
_METADATA_LIST = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"


async def load_credentials(kubeconfig: str | None = None) -> Configuration:
    """Return credentials from the pod's service account, else from `kubeconfig` (default: $KUBECONFIG,
    ~/.kube/config)."""
    configuration = Configuration()
    if kubeconfig is None and "KUBERNETES_SERVICE_HOST" in os.environ:
        kubernetes_config.load_incluster_config(client_configuration=configuration)
    else:
        await kubernetes_config.load_kube_config(config_file=kubeconfig, client_configuration=configuration)
    return configuration


class Client:
    """All requests of one process. Safe to use from many tasks of one event loop."""

    def __init__(
        self,
        configuration: Configuration,
        *,
        relogin: Callable[[], Awaitable[Configuration]] | None = None,
        timeout: float = 30.0,
        attempts: int = _ATTEMPTS,
        field_manager: str = FIELD_MANAGER,
    ) -> None:
        self.configuration = configuration
        self._relogin = relogin
        self._relogged_at = float("-inf")
        self._timeout = timeout
        self._attempts = attempts
        self._field_manager = field_manager
        self._session = open_api_session(configuration)
        self.clock = ServerClock()
        self.may_write: Callable[[], None] = lambda: (
            None
        )  # raises where another process may act: see `OperatorLease.check`
        self.used: set[tuple[str, str, str]] = (
            set()
        )  # (verb, group, resource[/subresource]), compared with rbac.USED_PERMISSIONS

    @classmethod
    async def connect(cls, kubeconfig: str | None = None, **options: Any) -> Client:
        async def load_again() -> Configuration:
            return await load_credentials(kubeconfig)

        return cls(await load_again(), relogin=load_again, **options)

    async def close(self) -> None:
        await self._session.close()

    # --- reading

    async def get(self, resource: ApiResource, namespace: str | None, name: str) -> ApiObject:
        return await self._send_with_retries("get", resource, "GET", resource.path(namespace, name))

    async def list(
        self,
        resource: ApiResource,
        namespace: str | None = None,
        *,
        labels: str | None = None,
        fields: str | None = None,
        page: int = PAGE,
        metadata_only: bool = False,
    ) -> AsyncIterator[ListPage]:
        """Yield all objects, page by page.

        Args:
            resource: The kind.
            namespace: The namespace; None for all of them.
            labels: A label selector.
            fields: A field selector.
            page: Most objects on a page.
            metadata_only: Whether no more of each object is wanted than its metadata.

        Raises:
            Gone: The server has compacted the pages away: start over.
        """
        token = ""
        while True:
            query = [("limit", str(page))]
            query += [("labelSelector", labels)] if labels else []
            query += [("fieldSelector", fields)] if fields else []
            query += [("continue", token)] if token else []
            accept = _METADATA_LIST if metadata_only else _JSON
            answer = await self._send_with_retries(
                "list", resource, "GET", resource.path(namespace), query, accept=accept
            )
            meta = answer.get("metadata") or {}
            yield ListPage(answer.get("items") or [], int(meta.get("resourceVersion") or 0))
            token = meta.get("continue") or ""
            if not token:
                return

    # --- writing

    async def create(
        self, resource: ApiResource, namespace: str | None, body: ApiObject, *, dry_run: bool = False
    ) -> ApiObject:
        """Create an object, and return what the server made of it. Raises `AlreadyExists`, or `Unreachable` with `sent`
        set when nobody knows.

        A dry run is harmless and simply repeated. It is strict about fields that the server does not know: it would
        drop them in silence, and a user's misspelt toleration with them.
        """
        query = [("fieldManager", self._field_manager), ("fieldValidation", "Strict" if dry_run else "Ignore")]
        if dry_run:
            query.append(("dryRun", "All"))
        return await self._send_with_retries(
            "create", resource, "POST", resource.path(namespace), query, body, blind=dry_run
        )

    async def delete(
        self, resource: ApiResource, namespace: str | None, name: str, *, uid: str | None, grace: int | None = None
    ) -> bool:
        """Delete exactly the object with this UID. It is success, too, if it is gone or replaced by another of the
        name. Return whether it was there.

        Only a Secret is deleted without: we may not read one, so we cannot know its UID.
        """
        body: ApiObject = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background"}
        if uid is not None:
            body["preconditions"] = {"uid": uid}
        if grace is not None:
            body["gracePeriodSeconds"] = grace
        try:
            await self._send_with_retries("delete", resource, "DELETE", resource.path(namespace, name), (), body)
        except errors.NotFound:
            return False
        except errors.Conflict:
            pass
        return True

    async def apply_status(self, resource: ApiResource, namespace: str | None, body: ApiObject) -> ApiObject:
        """Server-side apply of `status`. `body` carries name, UID and the observed resourceVersion: a stale one is
        `Conflict`, so two writers (an operator that lost its Lease unawares) cannot both win."""
        name = body["metadata"]["name"]
        path = resource.path(namespace, name, "status")
        query = [("fieldManager", self._field_manager), ("force", "true")]
        return await self._send_with_retries("patch", resource, "PATCH", path, query, body, sub="status", kind=_APPLY)

    async def merge_status(self, resource: ApiResource, namespace: str | None, body: ApiObject) -> ApiObject:
        """JSON merge patch of `status`, where null removes a field whoever owns it. `body` carries the name and the
        resourceVersion that was read: a stale one is `Conflict`."""
        path = resource.path(namespace, body["metadata"]["name"], "status")
        query = [("fieldManager", self._field_manager)]
        return await self._send_with_retries("patch", resource, "PATCH", path, query, body, sub="status", kind=_MERGE)

    async def merge(self, resource: ApiResource, namespace: str | None, body: ApiObject) -> ApiObject:
        """JSON merge patch. `body` carries the name and the resourceVersion that was read: see `merge_status`."""
        path = resource.path(namespace, body["metadata"]["name"])
        query = [("fieldManager", self._field_manager)]
        return await self._send_with_retries("patch", resource, "PATCH", path, query, body, kind=_MERGE)

    async def replace(self, resource: ApiResource, namespace: str | None, body: ApiObject) -> ApiObject:
        """Send a PUT with the body's resourceVersion (the Lease)."""
        path = resource.path(namespace, body["metadata"]["name"])
        return await self._send_once("update", resource, "PUT", path, (), body)

    # --- how

    async def _send_with_retries(
        self,
        verb: str,
        resource: ApiResource,
        method: str,
        path: str,
        query: Any = (),
        body: ApiObject | None = None,
        *,
        sub: str = "",
        kind: str = _JSON,
        accept: str = _JSON,
        blind: bool = True,
    ) -> ApiObject:
        """Send a request, again while that can help. `blind`: it may be repeated although it may have been
        processed."""

        def is_worth_repeating(error: BaseException) -> bool:
            if isinstance(error, errors.TooManyRequests | errors.AdmissionNotReady):
                return True
            if isinstance(error, errors.ServerError):
                return blind
            return isinstance(error, errors.Unreachable) and (blind or not error.sent)

        retrying = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception(is_worth_repeating),
            stop=tenacity.stop_after_attempt(self._attempts) | tenacity.stop_after_delay(3 * self._timeout),
            wait=_retry_delay,
            reraise=True,
        )
        async for attempt in retrying:
            with attempt:
                return await self._send_once(
                    verb, resource, method, path, query, body, sub=sub, kind=kind, accept=accept
                )
        raise AssertionError("tenacity re-raises")

    async def _send_once(
        self,
        verb: str,
        resource: ApiResource,
        method: str,
        path: str,
        query: Any = (),
        body: ApiObject | None = None,
        *,
        sub: str = "",
        kind: str = _JSON,
        accept: str = _JSON,
    ) -> ApiObject:
        what = f"{resource.plural}/{sub}" if sub else resource.plural
        if method != "GET" and resource != LEASES:
            self.may_write()
        self.used.add((verb, resource.group, what))
        try:
            return await self._send(verb, what, method, path, query, body, kind, accept)
        except errors.Unauthorized:
            if not await self._login_again():
                raise
            return await self._send(verb, what, method, path, query, body, kind, accept)

    async def _send(
        self,
        verb: str,
        what: str,
        method: str,
        path: str,
        query: Any,
        body: ApiObject | None,
        kind: str,
        accept: str = _JSON,
    ) -> ApiObject:
        started, asked_at = time.monotonic(), self.clock.steady()
        code = "error"
        try:
            response = await self._session.request(
                method,
                self.configuration.host + path,
                params=list(query),
                headers={"Accept": accept, "Content-Type": kind},
                data=None if body is None else json.dumps(body),
                allow_redirects=False,  # the token is for this server alone
                timeout=aiohttp.ClientTimeout(total=self._timeout, sock_connect=min(5.0, self._timeout)),
            )
            async with response:
                code = str(response.status)
                self.clock.observe(response.headers.get("Date", ""), asked_at)
                data = await response.read()
        except aiohttp.ClientConnectorError as error:
            raise errors.Unreachable(f"{method} {path}: {error}", sent=False) from error
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise errors.Unreachable(f"{method} {path}: {type(error).__name__} {error}", sent=True) from error
        finally:
            metrics.api_requests.labels(verb, what, code).inc()
            metrics.api_seconds.labels(verb).observe(time.monotonic() - started)
        return _parse_response(response, data)

    async def _login_again(self) -> bool:
        """Log in again once a kubeconfig's token has run out, at most every 10 s (in a pod the client re-reads its own
        each minute)."""
        if self._relogin is None or time.monotonic() - self._relogged_at < 10:
            return False
        self._relogged_at = time.monotonic()
        fresh = await self._relogin()
        self.configuration.api_key = fresh.api_key
        self.configuration.refresh_api_key_hook = fresh.refresh_api_key_hook
        log.info("logged in again")
        return True


def _retry_delay(state: tenacity.RetryCallState) -> float:
    """Return the seconds that the server asked for (Retry-After), else 0.1 s doubling; jittered, or 50 rejected creates
    return as one."""
    error = state.outcome.exception() if state.outcome else None
    if isinstance(error, errors.ApiError) and error.retry_after is not None:
        return min(error.retry_after, _RETRY_AFTER_MAX) * (1 + random.random() / 4)  # noqa: S311
    return float(min(5.0, 0.1 * 2.0**state.attempt_number) * (0.5 + random.random() / 2))  # noqa: S311


def _parse_response(response: aiohttp.ClientResponse, data: bytes) -> ApiObject:
    try:
        parsed = json.loads(data) if data else {}
    except ValueError:
        parsed = data[:512].decode("utf-8", "replace")
    if 200 <= response.status < 300:
        if not isinstance(parsed, dict):
            raise errors.ServerError(response.status, "NotJSON", f"not an API server's answer: {parsed!r}")
        return parsed
    retry_after = response.headers.get("Retry-After", "")
    raise errors.from_status(response.status, parsed, retry_after=float(retry_after) if retry_after.isdigit() else None)
