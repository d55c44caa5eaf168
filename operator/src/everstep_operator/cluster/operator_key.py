"""The operator key, from which every job's token is derived; had without the right to read Secrets.

Keys are rotated by naming another Secret: the operator makes it, and the one before is mounted as a previous key. A
Secret never changes, so no kubelet can show an operator an old content of it.

`get secrets` in the operator's namespace would be `get` on whatever else lies there, and a leaked operator token would
leak it all. So the Secret is created blindly and read back by the kubelet: it is mounted as an *optional* volume. The
first operator creates it and works with the key it holds in memory; every later one finds the file.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import secrets
from pathlib import Path

import structlog

from everstep_operator.cluster import errors
from everstep_operator.cluster.client import Client
from everstep_operator.cluster.resources import SECRETS

log = structlog.get_logger(__name__)

KEY_BYTES = 32
_FILE = "key"


class KeyUnavailable(Exception):
    """Another process made the key and the kubelet never showed it to us."""


def read_key(file: Path) -> bytes:
    """Return the key in a file.

    Raises:
        FileNotFoundError: There is none.
        KeyUnavailable: It has another length than a key: a Secret that was made by hand.
    """
    key = file.read_bytes()
    if len(key) != KEY_BYTES:
        raise KeyUnavailable(
            f"{file} has {len(key)} bytes, not {KEY_BYTES}: name another Secret as operatorKey.secretName, and the "
            "operator makes it"
        )
    return key


def read_previous_keys(folder: Path) -> tuple[bytes, ...]:
    """Return the previous keys: the files of a folder, which does not exist where there are none."""
    # A kubelet's own files, among them the link to the present version of the folder, begin with two dots.
    files = sorted(file for file in folder.glob("*") if not file.name.startswith(".."))
    return tuple(read_key(file) for file in files)


async def load_or_create_key(
    client: Client, namespace: str, folder: Path, secret: str, *, patience: float = 180.0
) -> bytes:
    """Return the current key, and make it if there is none.

    Args:
        client: Creates Secrets.
        namespace: Where the Secret is.
        folder: Where it is mounted.
        secret: Name of the Secret.
        patience: Seconds to wait where another operator has created it a moment ago (the kubelet refreshes optional
            volumes every 60 to 90 s).

    Raises:
        KeyUnavailable: It was not mounted within that time, or is no key.
    """
    file = folder / _FILE
    with contextlib.suppress(FileNotFoundError):
        return read_key(file)
    key = secrets.token_bytes(KEY_BYTES)
    body = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": secret, "labels": {"app.kubernetes.io/managed-by": "everstep"}},
        "immutable": True,
        "type": "Opaque",
        "data": {_FILE: base64.b64encode(key).decode()},
    }
    try:
        await client.create(SECRETS, namespace, body)
    except errors.AlreadyExists:
        log.info("the operator key exists already; waiting for the kubelet to mount it", secret=secret)
    except (errors.Unreachable, errors.ServerError) as error:
        # It may have been stored, and we may not read it back to see. Only the mounted file settles what the key is.
        log.warning("whether the operator key was created is unknown; waiting for it to be mounted", error=str(error))
    else:
        log.info("created the operator key", secret=secret, namespace=namespace)
        return key
    return await _wait_until_mounted(file, secret, patience)


async def _wait_until_mounted(file: Path, secret: str, patience: float) -> bytes:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + patience
    while loop.time() < deadline:
        with contextlib.suppress(FileNotFoundError):
            return read_key(file)
        await asyncio.sleep(min(1.0, patience / 10))
    raise KeyUnavailable(
        f"Secret {secret} exists but was not mounted as {file} within {patience:.0f} s: mount it as an optional volume "
        "of the operator's pod, or name another Secret as operatorKey.secretName to have a new one made"
    )
