"""The agent's code in every namespace that runs jobs: one immutable ConfigMap per version, named by its content.

Jobs keep the version they were started with (their frozen template names it), so a new operator adds a ConfigMap and
never changes one. What no pod and no job names any more is collected at resync.
"""

from __future__ import annotations

import base64
import hashlib
from collections import defaultdict
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import structlog

from everstep_operator.cluster import errors
from everstep_operator.cluster.api_answer import ApiObject
from everstep_operator.cluster.client import Client
from everstep_operator.cluster.resources import CONFIG_MAPS

log = structlog.get_logger(__name__)

AGENT_LABEL = "everstep.dev/agent"
KEEP_SECONDS = 3600.0
MAX_COLLECTED = 50  # ConfigMaps that are read in one collection: anybody may set our label
_FILE = "agent.pyz"
ALL = "*"  # among the names in use: nobody knows which, so all of them


def compute_digest(code: bytes) -> str:
    return hashlib.sha256(code).hexdigest()


def config_map_name(digest: str) -> str:
    return f"everstep-agent-{digest[:12]}"


def stored_digest(config_map: ApiObject) -> str:
    """Return the digest of the code that a ConfigMap holds, or nothing if it does not hold just that."""
    data = config_map.get("binaryData")
    if not isinstance(data, dict) or set(data) != {_FILE}:
        return ""
    try:
        return compute_digest(base64.b64decode(data[_FILE], validate=True))
    except (TypeError, ValueError):
        return ""


async def verify_agent_config_map(client: Client, namespace: str, name: str, digest: str) -> None:
    """Make sure that an agent of an older operator is the code that a job was started with.

    Args:
        client: Reads ConfigMaps.
        namespace: Namespace of the job.
        name: Name of the ConfigMap, which ends in the first digits of the digest.
        digest: The digest in the job's frozen template; empty if that has none, and the name has to do.

    Raises:
        errors.NotFound: It is not there.
        errors.NotOurs: It holds other code, which would run as PID 1 of every pod.
    """
    stored = stored_digest(await client.get(CONFIG_MAPS, namespace, name))
    if not stored or name != config_map_name(stored) or digest not in ("", stored):
        raise foreign_code_error(namespace, name)


def foreign_code_error(namespace: str, name: str) -> errors.NotOurs:
    """Return the error for a ConfigMap that has an agent's name, and other content."""
    return errors.NotOurs(f"ConfigMap {namespace}/{name}", "whoever put other code into it")


@dataclass
class AgentCode:
    """The zipapp of this operator and the namespaces known to have it."""

    code: bytes
    _present: set[str] = field(default_factory=set)
    _compared: dict[str, str] = field(default_factory=dict)  # UID of the immutable object with this code, by namespace
    _unused_since: dict[tuple[str, str], float] = field(default_factory=dict)

    @cached_property
    def digest(self) -> str:
        return compute_digest(self.code)

    @cached_property
    def encoded(self) -> str:
        """Return the code as a ConfigMap holds it."""
        return base64.b64encode(self.code).decode()

    @property
    def name(self) -> str:
        return config_map_name(self.digest)

    def config_map(self) -> ApiObject:
        return {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {
                "name": self.name,
                "labels": {"app.kubernetes.io/managed-by": "everstep", AGENT_LABEL: self.digest[:12]},
            },
            "immutable": True,
            "binaryData": {_FILE: self.encoded},
        }

    async def ensure(self, client: Client, namespace: str) -> None:
        """Make sure that the ConfigMap is in `namespace`, with this code. It is looked at for each set of pods: whoever
        may write ConfigMaps can replace it at any moment."""
        self._unused_since.pop((namespace, self.name), None)
        if not await self._is_as_compared(client, namespace):
            found = await self._stored(client, namespace)
            # Its name is a hash of its content, but anybody may write the name: what runs as PID 1 is compared.
            if found.get("binaryData") != {_FILE: self.encoded} and stored_digest(found) != self.digest:
                self._present.discard(namespace)
                raise foreign_code_error(namespace, self.name)
            uid = str(found["metadata"].get("uid") or "")
            if uid and found.get("immutable") is True:
                self._compared[namespace] = uid
        self._present.add(namespace)

    async def _is_as_compared(self, client: Client, namespace: str) -> bool:
        """Tell whether the object is there whose content was compared. What is immutable stays as it is until another
        object has its name: half a megabyte need not be read for each set of pods."""
        uid = self._compared.get(namespace)
        if uid is None:
            return False
        try:
            found = await client.get(CONFIG_MAPS, namespace, self.name, metadata_only=True)
        except errors.NotFound:
            return False
        return bool(found["metadata"].get("uid") == uid)

    async def _stored(self, client: Client, namespace: str) -> ApiObject:
        """Read the ConfigMap, or create it. In most namespaces it exists, and a used-up quota would reject even a
        create that changes nothing."""
        try:
            return await client.get(CONFIG_MAPS, namespace, self.name)
        except errors.NotFound:
            pass
        try:
            return await client.create(CONFIG_MAPS, namespace, self.config_map())
        except errors.AlreadyExists:  # for another job, in the same moment
            return await client.get(CONFIG_MAPS, namespace, self.name)

    def forget(self, namespace: str) -> None:
        """Forget that a namespace has the ConfigMap: somebody may have deleted it, so the next need reads it again."""
        self._present.discard(namespace)

    async def collect_garbage(
        self, client: Client, found: list[ApiObject], used: Mapping[str, Container[str]], now: float
    ) -> None:
        """Delete versions that nothing has named for an hour: a template about to be written may name one just listed.

        Args:
            client: Reads and deletes ConfigMaps.
            found: The metadata of all ConfigMaps with the agent's label.
            used: The names in use, by namespace.
            now: Monotonic seconds.
        """
        seen: defaultdict[str, set[str]] = defaultdict(set)
        left = MAX_COLLECTED
        for item in found:
            meta = item["metadata"]
            namespace, name, key = meta["namespace"], meta["name"], (meta["namespace"], meta["name"])
            seen[namespace].add(name)
            names = used.get(namespace, ())
            if name in names or ALL in names:
                self._unused_since.pop(key, None)
                continue
            if now - self._unused_since.setdefault(key, now) < KEEP_SECONDS or not left:
                continue
            left -= 1
            try:
                await self._collect(client, namespace, name)
            except (errors.ApiError, errors.Unreachable) as error:  # one namespace's webhook or policy, not all others'
                log.warning("cannot collect it", namespace=namespace, config_map=name, error=str(error))
                continue
            self._unused_since[key] = now  # one that was not ours to delete is not looked at for an hour
        self._present = {namespace for namespace in self._present if self.name in seen[namespace]}
        self._unused_since = {key: t for key, t in self._unused_since.items() if key[1] in seen[key[0]]}

    async def _collect(self, client: Client, namespace: str, name: str) -> None:
        try:
            stored = await client.get(CONFIG_MAPS, namespace, name)
        except errors.NotFound:
            return
        digest = stored_digest(stored)
        if not digest or name != config_map_name(digest) or (name == self.name and digest != self.digest):
            return  # anybody may set our label and write our name: this is no agent, and not ours to delete
        log.info("collecting an agent nobody uses", namespace=namespace, config_map=name)
        if name == self.name:
            self._present.discard(namespace)
        await client.delete(CONFIG_MAPS, namespace, name, uid=stored["metadata"]["uid"])

    async def restore_missing(self, client: Client, used: Mapping[str, Container[str]]) -> None:
        """Create the ConfigMap again where it is used and the last `collect_garbage` has not found it: new pods wait
        for it in vain."""
        for namespace in sorted(ns for ns, names in used.items() if self.name in names and ns not in self._present):
            log.warning("the agent of unfinished jobs was gone", namespace=namespace, config_map=self.name)
            try:
                await self.ensure(client, namespace)
            except (errors.ApiError, errors.NotOurs) as error:  # one namespace's quota or webhook, not all others'
                log.warning("cannot restore it", namespace=namespace, error=str(error))
