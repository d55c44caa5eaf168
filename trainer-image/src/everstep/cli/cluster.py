"""A cluster as the commands see it: a job, its pods, their logs. Plain dictionaries, as the API server sent them."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Sequence
from typing import Any

from everstep.cli.errors import CliError

GROUP = "everstep.dev"
VERSION = "v1alpha1"
JOB_LABEL = f"{GROUP}/job"
INDEX_LABEL = f"{GROUP}/index"
FINISHED_PHASES = frozenset({"Succeeded", "Failed"})
OUTAGE_SECONDS = 300.0  # so long a command that follows a job waits for the API server
# Seconds of silence until the other end is asked, seconds between two questions, and how many are asked in vain.
_KEEP_ALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPALIVE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 6}
_UNAVAILABLE = frozenset({429, 500, 502, 503, 504})  # HTTP codes that ask for another try

RECORD_NAME = "everstep-node-failures"

ApiObject = dict[str, Any]
_JSON = {"Accept": "application/json"}
_MERGE_PATCH = {"Content-Type": "application/merge-patch+json"}


class LogsNotReadyError(Exception):
    """The container has not started yet, or its pod is gone."""


class ClusterUnavailableError(CliError):
    """The API server does not answer, or cannot serve requests now. It may soon."""


class Outage:
    """The time for which the API server has not answered a command that follows a job."""

    def __init__(self, seconds: float = OUTAGE_SECONDS) -> None:
        """Begin now; `seconds` is how long an outage is endured."""
        self._seconds = seconds
        self.end()

    def end(self) -> None:
        """Note that it has answered."""
        self._answered = time.monotonic()

    def endure(self, error: ClusterUnavailableError) -> None:
        """Note that it has not.

        Raises:
            ClusterUnavailableError: `error`, once this has lasted too long.
        """
        if time.monotonic() >= self._answered + self._seconds:
            raise error


class ClusterClient:
    """A client of a cluster. It is safe to use from several threads."""

    def __init__(self, context: str | None, namespace: str | None) -> None:
        try:
            from kubernetes import client, config
            from yaml import YAMLError
        except ImportError:
            raise CliError("this command needs the Kubernetes client: pip install 'everstep[operator]'") from None
        try:
            _load_credentials(config, context)
        except config.ConfigException as error:
            raise CliError(f"no cluster is configured: {error}. Set KUBECONFIG, or choose one with --context") from None
        except (YAMLError, TypeError) as error:  # a file that is no YAML, or is no kubeconfig
            raise CliError(f"the kubeconfig cannot be read: {error}. Correct it, or set KUBECONFIG") from None
        configuration = client.Configuration.get_default_copy()
        configuration.socket_options = _keep_alive()
        self._api = client.ApiClient(configuration)
        self._errors = client.exceptions
        self.namespace = namespace or _find_namespace(config, context)

    def job(self, name: str) -> ApiObject | None:
        return self._get(f"/apis/{GROUP}/{VERSION}/namespaces/{self.namespace}/trainingjobs/{name}")

    def existing_job(self, name: str) -> ApiObject:
        job = self.job(name)
        if job is None:
            raise CliError(
                f"there is no TrainingJob {name} in namespace {self.namespace}: "
                "list all jobs with kubectl get trainingjobs -A"
            )
        return job

    def pods(self, job: str) -> list[ApiObject]:
        """Return the job's pods by index, those that are going included."""
        found = self._get(f"/api/v1/namespaces/{self.namespace}/pods", labelSelector=f"{JOB_LABEL}={job}")
        items: list[ApiObject] = found["items"] if found else []
        return sorted(items, key=lambda pod: int(pod["metadata"]["labels"].get(INDEX_LABEL, 0)))

    def log(self, pod: str, *, follow: bool, since: str = "") -> Iterator[str]:
        """Yield lines of the trainer container, each with its time.

        A broken connection ends the iterator: whoever follows asks again.

        Args:
            pod: Name of the pod.
            follow: Whether to wait for further lines.
            since: An RFC 3339 time; empty for the whole log.

        Raises:
            LogsNotReadyError: The container has not started yet.
        """
        from urllib3.exceptions import HTTPError

        query = {"container": "trainer", "timestamps": "true", "follow": str(follow).lower()}
        if since:
            query["sinceTime"] = since
        try:
            answer = self._call(f"/api/v1/namespaces/{self.namespace}/pods/{pod}/log", query, raw=True)
        except self._errors.ApiException as error:
            if error.status in (400, 404):
                raise LogsNotReadyError(str(error.reason)) from None
            raise self._explained(error) from None
        rest = b""
        try:
            for piece in answer.stream(65536, decode_content=True):
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    yield line.decode(errors="replace")
        except HTTPError:
            return
        finally:
            answer.release_conn()
        if rest:
            yield rest.decode(errors="replace")

    def read_node_failures(self) -> dict[str, str]:
        """Return the operator's record of nodes on which jobs have failed: JSON by node."""
        found = self._get(f"/api/v1/namespaces/{self.namespace}/configmaps/{RECORD_NAME}")
        return dict((found or {}).get("data") or {})

    def clear_node_failures(self, nodes: Sequence[str]) -> None:
        """Remove nodes from the record."""
        path = f"/api/v1/namespaces/{self.namespace}/configmaps/{RECORD_NAME}"
        try:
            self._call(path, {}, raw=False, patch={"data": dict.fromkeys(nodes)})
        except self._errors.ApiException as error:
            raise self._explained(error) from None

    def _get(self, path: str, **query: str) -> ApiObject | None:
        try:
            answer: ApiObject = self._call(path, query, raw=False)
        except self._errors.ApiException as error:
            if error.status == 404:
                return None
            raise self._explained(error) from None
        return answer

    def _call(self, path: str, query: dict[str, str], *, raw: bool, patch: ApiObject | None = None) -> Any:
        from urllib3.exceptions import HTTPError

        try:
            return self._api.call_api(
                path,
                "GET" if patch is None else "PATCH",
                query_params=list(query.items()),
                header_params={**({} if raw else _JSON), **({} if patch is None else _MERGE_PATCH)},
                body=patch,
                response_types_map={200: "object"},
                auth_settings=["BearerToken"],
                _return_http_data_only=True,
                _preload_content=not raw,
                _request_timeout=(10, 60) if not raw else (10, None),
            )
        except HTTPError as error:
            raise ClusterUnavailableError(f"the API server is unavailable: {error}") from None

    @staticmethod
    def _explained(error: Any) -> CliError:
        import json

        try:
            message = json.loads(error.body)["message"]
        except (TypeError, ValueError, KeyError):
            message = f"{error.status} {error.reason}"
        kind = ClusterUnavailableError if error.status in _UNAVAILABLE else CliError
        return kind(f"the API server rejected the request: {message}")


def _keep_alive() -> list[tuple[int, int, int]]:
    """Return socket options by which a connection ends that nobody keeps any more.

    Whoever follows a log only reads. Load balancers and NAT forget a connection on which nothing came for some minutes,
    and then tell the API server alone.
    """
    from urllib3.connection import HTTPConnection

    options = [*HTTPConnection.default_socket_options, (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
    for name, value in _KEEP_ALIVE.items():
        if (number := getattr(socket, name, None)) is not None:  # each system has its own
            options.append((socket.IPPROTO_TCP, number, value))
    return options


def _load_credentials(config: Any, context: str | None) -> None:
    try:
        config.load_kube_config(context=context)
    except config.ConfigException:
        # In a pod, such as a notebook's, there is a service account instead.
        if context is not None or "KUBERNETES_SERVICE_HOST" not in os.environ:
            raise
        config.load_incluster_config()


def _find_namespace(config: Any, context: str | None) -> str:
    """Return the context's namespace, as kubectl takes it."""
    try:
        contexts, active = config.list_kube_config_contexts()
    except config.ConfigException:
        return "default"
    chosen = next((each for each in contexts if each["name"] == context), active)
    return str(chosen["context"].get("namespace") or "default")
