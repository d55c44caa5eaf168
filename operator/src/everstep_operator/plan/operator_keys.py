"""The operator keys by which jobs' pods go. While keys are rotated there are several: the current one, and previous
ones.

What is made anew goes by the current key. A set of pods keeps the key that it was made with, since all of its agents
share one token: its frozen template, its Secret and every replacement go by that one, until the job is resolved again.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Sequence


def make_secret_name(job: str, uid: str, epoch: int, key: bytes) -> str:
    """Return the name of the Secret of a template epoch, which nobody without the operator's key can guess.

    The operator may not read Secrets, so a name is all that tells whose one is. With this one, "already exists" means
    that an earlier attempt of this operator made it; a stranger's is never taken for the job's, and never deleted. It
    tells by which key it was made, too.

    Args:
        job: Name of the job.
        uid: UID of the job: a former job of the same name has other Secrets.
        epoch: The template epoch.
        key: The operator key.

    Returns:
        `<job>-<epoch>-` and 20 hexadecimal digits. The template's ConfigMap keeps it, in the pod's volumes.
    """
    suffix = hmac.new(key, f"secret-name/{uid}/{epoch}".encode(), hashlib.sha256).hexdigest()[:20]
    return f"{job}-{epoch}-{suffix}"


def find_key(secrets: Iterable[str], job: str, uid: str, epoch: int, keys: Sequence[bytes]) -> bytes:
    """Find the operator key by which Secrets of a template epoch were made.

    Args:
        secrets: Names of Secrets: one that a template names, or those that pods mount.
        job: Name of the job.
        uid: UID of the job.
        epoch: The template epoch.
        keys: The operator keys, the current one first.

    Returns:
        The key that gives one of these names; the current key if none does.
    """
    names = frozenset(secrets)
    return next((key for key in keys if make_secret_name(job, uid, epoch, key) in names), keys[0])
