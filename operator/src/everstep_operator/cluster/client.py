"""The API server, as the operator uses it: plain dictionaries in and out, typed errors, bounded patience.

Built on the asyncio half of the official client (`kubernetes.aio`) for what is hard to get right: kubeconfig, exec
plug-ins, in-cluster tokens that rotate. Its typed models are never constructed: a user's pod template may hold
fields that the pinned version does not know, and a model would drop or refuse them. Nor are its requests made: they
walk through each body to serialize models in it, and log whole answers, Secrets included.

What may be sent twice: reads, deletes with a UID precondition, status applied with a resourceVersion, dry runs.
A create may not, once its result is unknown: `Unreachable.sent` goes up to the caller, who reads before writing again.
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any, NamedTuple

import aiohttp
import structlog
import tenacity
from kubernetes.aio import config as kubernetes_config
from kubernetes.aio.client import Configuration

from everstep_operator import metrics
from everstep_operator.cluster import errors
from everstep_operator.cluster.api_answer import (
    ApiObject,
    Decode,
    compute_retry_delay,
    decode_body,
    encode_body,
    parse_response,
    typed_errors,
)
from everstep_operator.cluster.api_session import open_api_session
from everstep_operator.cluster.resources import LEASES, ApiResource
from everstep_operator.cluster.server_clock import ServerClock
from everstep_operator.cluster.stream_pacing import StreamPacer, gather_events

log = structlog.get_logger(__name__)


class ListPage(NamedTuple):
    items: list[ApiObject]
    version: int  # the state that all pages of this list show


FIELD_MANAGER = "everstep-operator"
_ATTEMPTS = 5
# Objects on one page of a list. Whoever may create them decides how large they are, up to 1.5 MiB each.
PAGE = 100
WATCH_SECONDS = 300  # after which the server ends a watch
# A server sends a bookmark each minute. A stream that says nothing for longer may have been cut somewhere on its way.
SILENCE_SECONDS = 75.0
_METHODS = {"get": "GET", "list": "GET", "create": "POST", "delete": "DELETE", "patch": "PATCH", "update": "PUT"}
_JSON = "application/json"
_APPLY = "application/apply-patch+yaml"  # JSON is YAML, and every server with server-side apply knows this type
_MERGE = "application/merge-patch+json"
_METADATA = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
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
        self._timeouts = aiohttp.ClientTimeout(total=timeout, sock_connect=min(5.0, timeout))
        self._attempts = attempts
        self._field_manager = field_manager
        self._session = open_api_session(configuration)
        self.clock = ServerClock()
        self.may_write: Callable[[], None] = lambda: (
            None
        )  # raises where another process may act: see `OperatorLease.check`
        self.throttled: Callable[[], None] = lambda: None  # called when the server rejects a request for their number
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

    async def get(
        self, resource: ApiResource, namespace: str | None, name: str, *, metadata_only: bool = False
    ) -> ApiObject:
        accept = _METADATA if metadata_only else _JSON
        return await self._send_with_retries("get", resource, resource.path(namespace, name), accept=accept)

    async def list(
        self,
        resource: ApiResource,
        namespace: str | None = None,
        *,
        labels: str | None = None,
        fields: str | None = None,
        page: int = PAGE,
        metadata_only: bool = False,
        decode: Decode = decode_body,
    ) -> AsyncIterator[ListPage]:
        """Yield all objects, page by page.

        Args:
            resource: The kind.
            namespace: The namespace; None for all of them.
            labels: A label selector.
            fields: A field selector.
            page: Most objects on a page.
            metadata_only: Whether no more of each object is wanted than its metadata.
            decode: Decodes a page.

        Raises:
            Gone: The server has compacted the pages away: start over.
            ServerError: What came is no list.
        """
        token = ""
        while True:
            query = [("limit", str(page))]
            query += [("labelSelector", labels)] if labels else []
            query += [("fieldSelector", fields)] if fields else []
            query += [("continue", token)] if token else []
            accept = _METADATA_LIST if metadata_only else _JSON
            answer = await self._send_with_retries(
                "list", resource, resource.path(namespace), query, accept=accept, decode=decode
            )
            meta = answer.get("metadata") or {}
            version = str(meta.get("resourceVersion") or "")
            if not version.isdecimal():
                # Of a proxy, perhaps: taken for an empty list, it would tell that all objects are gone.
                raise errors.ServerError(200, "NotAList", f"not a list of {resource.plural}: {str(answer)[:200]}")
            yield ListPage(answer.get("items") or [], int(version))
            token = meta.get("continue") or ""
            if not token:
                return

    async def watch(
        self, resource: ApiResource, namespace: str | None = None, *, version: int, labels: str | None = None
    ) -> AsyncGenerator[bytes]:
        """Yield events as they come, each as its line of JSON, until the server ends the stream or falls silent.

        Args:
            resource: The kind.
            namespace: The namespace; None for all of them.
            version: The resourceVersion after which to begin.
            labels: A label selector.

        Raises:
            Gone: The server no longer knows what happened after that version.
        """
        path = resource.path(namespace)
        query = [("watch", "true"), ("resourceVersion", str(version)), ("allowWatchBookmarks", "true")]
        query += [("timeoutSeconds", str(WATCH_SECONDS))]
        query += [("labelSelector", labels)] if labels else []
        self.used.add(("watch", resource.group, resource.plural))
        try:
            response = await self._open_watch(resource, path, query)
        except errors.Unauthorized:
            if not await self._login_again():
                raise
            response = await self._open_watch(resource, path, query)
        async with response:
            rest, pacer = b"", StreamPacer()
            while True:
                with typed_errors("watch", path):
                    try:
                        data = await response.content.readany()
                    except TimeoutError:
                        log.info("a watch was silent", path=path, seconds=SILENCE_SECONDS)
                        return
                if not data:
                    return
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    yield line
                if pacer.note(len(lines)):
                    await gather_events(response)

    async def _open_watch(self, resource: ApiResource, path: str, query: Any) -> aiohttp.ClientResponse:
        code = "error"
        try:
            with typed_errors("watch", path):
                response = await self._session.get(
                    self.configuration.host + path,
                    params=query,
                    headers={"Accept": _JSON},
                    allow_redirects=False,
                    timeout=aiohttp.ClientTimeout(total=None, sock_connect=5.0, sock_read=SILENCE_SECONDS),
                )
                code = str(response.status)
                if response.status == 200:
                    return response
                async with response:
                    data = await response.read()
        finally:
            metrics.api_requests.labels("watch", resource.plural, code).inc()
        parse_response(response, data)
        raise errors.ServerError(response.status, "NotOK", "not an API server's answer to a watch")

    # --- writing

    async def create(
        self,
        resource: ApiResource,
        namespace: str | None,
        body: ApiObject,
        *,
        dry_run: bool = False,
        decode: Decode = decode_body,
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
            "create", resource, resource.path(namespace), query, body, blind=dry_run, decode=decode
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
            await self._send_with_retries("delete", resource, resource.path(namespace, name), (), body)
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
        return await self._send_with_retries("patch", resource, path, query, body, sub="status", kind=_APPLY)

    async def merge_status(self, resource: ApiResource, namespace: str | None, body: ApiObject) -> ApiObject:
        """JSON merge patch of `status`, where null removes a field whoever owns it. `body` carries the name and the
        resourceVersion that was read: a stale one is `Conflict`."""
        path = resource.path(namespace, body["metadata"]["name"], "status")
        query = [("fieldManager", self._field_manager)]
        return await self._send_with_retries("patch", resource, path, query, body, sub="status", kind=_MERGE)

    async def merge(self, resource: ApiResource, namespace: str | None, body: ApiObject) -> ApiObject:
        """JSON merge patch. `body` carries the name and the resourceVersion that was read: see `merge_status`."""
        path = resource.path(namespace, body["metadata"]["name"])
        query = [("fieldManager", self._field_manager)]
        return await self._send_with_retries("patch", resource, path, query, body, kind=_MERGE)

    async def replace(self, resource: ApiResource, namespace: str | None, body: ApiObject) -> ApiObject:
        """Send a PUT with the body's resourceVersion (the Lease)."""
        path = resource.path(namespace, body["metadata"]["name"])
        return await self._send_once("update", resource, path, (), body)

    # --- how

    async def _send_with_retries(
        self,
        verb: str,
        resource: ApiResource,
        path: str,
        query: Any = (),
        body: ApiObject | None = None,
        *,
        sub: str = "",
        kind: str = _JSON,
        accept: str = _JSON,
        blind: bool = True,
        decode: Decode = decode_body,
    ) -> ApiObject:
        """Send a request, again while that can help. `blind`: it may be repeated although it may have been
        processed."""

        def is_worth_repeating(error: BaseException) -> bool:
            if isinstance(error, errors.TooManyRequests | errors.AdmissionNotReady):
                return True
            if isinstance(error, errors.ServerError):
                return blind
            return isinstance(error, errors.Unreachable) and (blind or not error.sent)

        async def send() -> ApiObject:
            return await self._send_once(
                verb, resource, path, query, body, sub=sub, kind=kind, accept=accept, decode=decode
            )

        started, failed = time.monotonic(), list[errors.ApiError | errors.Unreachable]()
        try:
            return await send()  # for nearly all that is enough, and what tenacity notes costs as much as their JSON
        except (errors.ApiError, errors.Unreachable) as error:
            if not is_worth_repeating(error):
                raise
            failed.append(error)
        retrying = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception(is_worth_repeating),
            stop=tenacity.stop_after_attempt(self._attempts)
            | tenacity.stop_after_delay(3 * self._timeout - (time.monotonic() - started)),
            wait=compute_retry_delay,
            reraise=True,
        )
        async for attempt in retrying:
            with attempt:
                if failed:
                    raise failed.pop()  # the first attempt
                return await send()
        raise AssertionError("tenacity re-raises")

    async def _send_once(
        self,
        verb: str,
        resource: ApiResource,
        path: str,
        query: Any = (),
        body: ApiObject | None = None,
        *,
        sub: str = "",
        kind: str = _JSON,
        accept: str = _JSON,
        decode: Decode = decode_body,
    ) -> ApiObject:
        method, what = _METHODS[verb], f"{resource.plural}/{sub}" if sub else resource.plural
        if method != "GET" and resource != LEASES:
            self.may_write()
        self.used.add((verb, resource.group, what))
        try:
            return await self._send(verb, what, method, path, query, body, kind, accept, decode)
        except errors.Unauthorized:
            if not await self._login_again():
                raise
            return await self._send(verb, what, method, path, query, body, kind, accept, decode)
        except errors.TooManyRequests:
            self.throttled()
            raise

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
        decode: Decode = decode_body,
    ) -> ApiObject:
        started, asked_at = time.monotonic(), self.clock.steady()
        code = "error"
        try:
            with typed_errors(method, path):
                response = await self._session.request(
                    method,
                    self.configuration.host + path,
                    params=list(query),
                    headers={"Accept": accept, "Content-Type": kind},
                    data=None if body is None else encode_body(body),
                    allow_redirects=False,  # the token is for this server alone
                    timeout=self._timeouts,
                )
                async with response:
                    code = str(response.status)
                    self.clock.observe(response.headers.get("Date", ""), asked_at)
                    data = await response.read()
        finally:
            metrics.api_requests.labels(verb, what, code).inc()
            metrics.api_seconds.labels(verb).observe(time.monotonic() - started)
        return parse_response(response, data, decode)

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
