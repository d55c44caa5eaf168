"""A cluster as a test sees it: apply, wait for a condition with a deadline, read what is there.

Reads go through the official client without its models (plain dictionaries, as the API server sent them);
what is about `kubectl` itself goes through the real kubectl.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import yaml
from kubernetes import client, config

Object = dict[str, Any]
T = TypeVar("T")
PATIENCE = 3  # times as long as a wait takes on two idle cores: for it costs nothing where all goes well
GROUP = "everstep.dev"
JOBS = f"/apis/{GROUP}/v1alpha1/namespaces/{{namespace}}/trainingjobs"
FINISHED = ("Succeeded", "Failed")
LOG_TRIES = 3
CONNECTIONS = 60  # kept open; one thread more than that would shake hands for each of its requests


class WaitTimeoutError(AssertionError):
    """A condition did not come true in time; carries what was seen last."""


class Cluster:
    """One Kubernetes cluster, by its kubeconfig."""

    def __init__(self, kubeconfig: Path, kubectl: Path | str = "kubectl") -> None:
        self.kubeconfig = kubeconfig
        self._kubectl = str(kubectl)
        configuration = client.Configuration()
        configuration.connection_pool_maxsize = CONNECTIONS
        self._api: client.ApiClient = config.new_client_from_config(str(kubeconfig), client_configuration=configuration)

    # -- kubectl ---------------------------------------------------------------------------------------------------

    def kubectl(self, *args: str, stdin: str | None = None, check: bool = True, timeout: float = 60 * PATIENCE) -> str:
        """Run the real kubectl; returns its standard output. Raises AssertionError with what it said."""
        done = subprocess.run(
            [self._kubectl, "--kubeconfig", str(self.kubeconfig), *args],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        if check and done.returncode != 0:
            raise AssertionError(f"kubectl {' '.join(args)}: exit {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout if check else done.stdout + done.stderr

    def apply(self, *objects: Object, namespace: str) -> str:
        return self.kubectl("apply", "-n", namespace, "-f", "-", stdin=yaml.safe_dump_all(objects))

    # -- API -------------------------------------------------------------------------------------------------------

    def request(self, method: str, path: str, body: Object | None = None, /, **query: str) -> Object:
        content = "application/merge-patch+json" if method == "PATCH" else "application/json"
        answer: Object = self._api.call_api(
            path,
            method,
            query_params=list(query.items()),
            header_params={"Accept": "application/json", "Content-Type": content},
            body=body,
            response_types_map=dict.fromkeys(range(200, 210), "object"),
            auth_settings=["BearerToken"],
            _return_http_data_only=True,
            _request_timeout=20,
        )
        return answer

    def stream(self, path: str, accept: str = "application/json", /, **query: str) -> Iterator[bytes]:
        """Yield the lines of an answer as they come: a watch."""
        answer = self._api.call_api(
            path,
            "GET",
            query_params=list(query.items()),
            header_params={"Accept": accept},
            auth_settings=["BearerToken"],
            _return_http_data_only=True,
            _preload_content=False,
        )
        yield from answer

    def get(self, path: str, **query: str) -> Object | None:
        try:
            return self.request("GET", path, None, **query)
        except client.ApiException as error:
            if error.status == 404:
                return None
            raise

    def items(self, path: str, **query: str) -> list[Object]:
        found = self.get(path, **query)
        return [] if found is None else list(found["items"])

    def job(self, namespace: str, name: str) -> Object | None:
        return self.get(f"{JOBS.format(namespace=namespace)}/{name}")

    def pods(self, namespace: str, job: str) -> list[Object]:
        """Return the job's pods, by index."""
        found = self.items(f"/api/v1/namespaces/{namespace}/pods", labelSelector=f"{GROUP}/job={job}")
        return sorted(found, key=lambda pod: int(pod["metadata"]["labels"][f"{GROUP}/index"]))

    def reported(self, namespace: str, job: str, timeout: float = 60) -> list[Object]:
        """Return the job's pods, by index, once kubelets have told that each was started, and so its address and
        container.

        Ranks may run, and even end, before that: agents tell the operator sooner than kubelets tell the API server.
        """

        def look() -> list[Object] | None:
            pods = self.pods(namespace, job)
            return pods if all(pod["status"].get("phase", "Pending") != "Pending" for pod in pods) else None

        return wait(look, timeout, f"kubelets report the pods of {job} in {namespace}")

    def logs(self, namespace: str, pod: str) -> str:
        """Return what the pod has written so far; what the API server says instead where there is no log.

        A kubelet that does not answer in time is asked again: the log is there.
        """
        path = f"/api/v1/namespaces/{namespace}/pods/{pod}/log"
        said = ""
        for _ in range(LOG_TRIES):
            said, is_there = self._read_log(path)
            if is_there:
                break
        return said

    def _read_log(self, path: str) -> tuple[str, bool]:
        """Return what is there, and whether that is all that can be had."""
        try:
            # One kubectl for each of a job's pods would cost more than the job.
            answer = self._api.call_api(
                path,
                "GET",
                auth_settings=["BearerToken"],
                _return_http_data_only=True,
                _preload_content=False,
                _request_timeout=60,
            )
        except client.ApiException as error:
            return str(error.body), error.status < 500
        text: bytes = answer.data
        return text.decode(errors="replace"), True

    def all_logs(self, namespace: str, job: str) -> str:
        """Return what the job's pods have written so far; all that they wrote once the job is finished.

        The agents tell of the end sooner than the container runtimes have passed on the last lines.
        """
        found = self.job(namespace, job)
        pods = self.reported(namespace, job)
        if found is not None and phase(found) in FINISHED:
            wait(lambda: self._have_ended(namespace, job), 60, f"the pods of {job} in {namespace} end")
        return "\n".join(self.logs(namespace, pod["metadata"]["name"]) for pod in pods)

    def _have_ended(self, namespace: str, job: str) -> bool:
        pods = [pod for pod in self.pods(namespace, job) if "deletionTimestamp" not in pod["metadata"]]
        return all(pod["status"].get("phase") in FINISHED for pod in pods)

    def exec(self, namespace: str, pod: str, *command: str, check: bool = True) -> str:
        return self.kubectl("exec", "-n", namespace, pod, "--", *command, check=check)

    # -- waiting ---------------------------------------------------------------------------------------------------

    def wait_job(
        self, namespace: str, name: str, until: Callable[[Object], object], timeout: float = 60, what: str = ""
    ) -> Object:
        """Wait until ``until(job)`` is truthy; the job as it was then."""

        def look() -> Object | None:
            job = self.job(namespace, name)
            return job if job is not None and until(job) else None

        try:
            return wait(look, timeout, what or f"job {name}")
        except WaitTimeoutError as error:
            raise WaitTimeoutError(f"{error}\n{self.explain(namespace, name)}") from None

    def wait_phase(self, namespace: str, name: str, *phases: str, timeout: float = 60) -> Object:
        job = self.wait_job(
            namespace,
            name,
            # A finished job never leaves its phase: waiting on would only hide the reason.
            lambda job: phase(job) in (*phases, *FINISHED),
            timeout,
            f"job {name} in phase {' or '.join(phases)}",
        )
        assert phase(job) in phases, self.explain(namespace, name)
        return job

    def versions(self, namespace: str, name: str) -> list[tuple[str, str]]:
        """UID and resourceVersion of the job's pods, once kubelets have reported all."""
        pods = self.reported(namespace, name)
        return [(pod["metadata"]["uid"], pod["metadata"]["resourceVersion"]) for pod in pods]

    def explain(self, namespace: str, name: str) -> str:
        """Return what a person would look at when a job surprises: status, pods, events, last log lines."""
        job = self.job(namespace, name)
        lines = [json.dumps((job or {}).get("status"), indent=1)]
        for pod in self.pods(namespace, name):
            status = pod["status"]
            lines.append(f"{pod['metadata']['name']} {status.get('phase')}")
            lines.append(json.dumps(status.get("containerStatuses")))
            lines.append(self.logs(namespace, pod["metadata"]["name"])[-2000:])
        events = self.kubectl("get", "events", "-n", namespace, "--sort-by=.lastTimestamp", check=False)
        lines.append(events[-3000:])
        return "\n".join(lines)

    @contextmanager
    def namespace(self, prefix: str = "t", **labels: str) -> Iterator[str]:
        """Provide a fresh namespace under the restricted pod security standard, gone afterwards."""
        name = f"{prefix}-{uuid4().hex[:6]}"
        enforced = {"pod-security.kubernetes.io/enforce": "restricted"} | labels
        self.request("POST", "/api/v1/namespaces", {"metadata": {"name": name, "labels": enforced}})
        try:
            # Pods are refused until the controller-manager has made the default service account.
            wait(lambda: self.get(f"/api/v1/namespaces/{name}/serviceaccounts/default"), 30, "default service account")
            yield name
        finally:
            # Pods with a long grace period would keep the namespace, and their resources, until it ends.
            gone = f"/api/v1/namespaces/{name}"
            for path, query in (
                (JOBS.format(namespace=name), {}),
                (f"{gone}/pods", {"gracePeriodSeconds": "1"}),
                (gone, {}),
            ):
                # What cannot be deleted is left to the end of the cluster, and hides no test's own failure.
                with suppress(client.ApiException):
                    self.request("DELETE", path, None, **query)


def wait(look: Callable[[], T | None], timeout: float, what: str, every: float = 0.1) -> T:
    """Poll ``look`` until it returns something truthy, at most ``timeout`` seconds on an idle machine."""
    timeout *= PATIENCE
    deadline = time.monotonic() + timeout
    while True:
        found = look()
        if found:
            return found
        if time.monotonic() > deadline:
            raise WaitTimeoutError(f"waited {timeout:.0f} s for {what}")
        time.sleep(every)


def phase(job: Object) -> str:
    return str(job.get("status", {}).get("phase", ""))


def condition(job: Object, kind: str) -> Object:
    """Return the condition of that type, an empty dictionary when there is none."""
    found: list[Object] = [c for c in job.get("status", {}).get("conditions", []) if c["type"] == kind]
    return found[0] if found else {}


def training_job(name: str, command: list[str] | None, **spec: Any) -> Object:
    """Return a small TrainingJob of the bring-your-own image; ``spec`` overrides."""
    body: Object = {
        "image": "docker.io/everstep/byo:test",
        "imagePullPolicy": "IfNotPresent",
        "resources": {"requests": {"cpu": "10m", "memory": "32Mi"}},
    }
    if command is not None:
        body["command"] = command
    body |= spec
    return {"apiVersion": f"{GROUP}/v1alpha1", "kind": "TrainingJob", "metadata": {"name": name}, "spec": body}


def python(source: str) -> list[str]:
    """Return a rank that runs this Python source, unbuffered."""
    return ["python3", "-u", "-c", source]
