"""Authenticates the callers of agents: HMACs over single-use nonces, as docs/design/001-training-job.md defines them.

Pure functions and one small store, so that the operator signs its requests with the very code that verifies them.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections import OrderedDict
from pathlib import Path

NONCE_SECONDS = 30.0
MAX_NONCES = 1024
MIN_TOKEN_BYTES = 16

NONCE_HEADER = "X-Everstep-Nonce"
CLIENT_HEADER = "X-Everstep-Client"
MAC_HEADER = "X-Everstep-MAC"
NEXT_NONCE_HEADER = "X-Everstep-Next-Nonce"

TO_AGENT = ">"
TO_LEADER = "<"


def job_token(operator_key: bytes, job_uid: str, template_epoch: int) -> bytes:
    """Return the 32 bytes that every agent of one template epoch shares with the operator.

    Args:
        operator_key: The operator key.
        job_uid: UID of the job.
        template_epoch: The template epoch.
    """
    return hmac.new(operator_key, f"{job_uid}/{template_epoch}".encode(), hashlib.sha256).digest()


def read_token(path: Path) -> bytes:
    """Return the token's raw bytes. They are read once at start: the file may be replaced under us, and the token goes
    nowhere else."""
    token = path.read_bytes()
    if len(token) < MIN_TOKEN_BYTES:
        raise ValueError(f"{path}: a token has at least {MIN_TOKEN_BYTES} bytes, this file has {len(token)}")
    return token


def new_nonce() -> str:
    return os.urandom(16).hex()


def is_nonce(text: str) -> bool:
    return len(text) == 32 and all(c in "0123456789abcdef" for c in text)


def request_mac(token: bytes, method: str, target: str, nonce: str, client: str, body: bytes) -> str:
    """Return the MAC of a request, in hex.

    Args:
        token: The job's token.
        method: The HTTP method.
        target: The path with its query, exactly as sent.
        nonce: A nonce that the server gave out.
        client: A nonce of the caller.
        body: The request's body.
    """
    text = f"request\n{method}\n{target}\n{nonce}\n{client}\n{hashlib.sha256(body).hexdigest()}"
    return hmac.new(token, text.encode(), hashlib.sha256).hexdigest()


def response_mac(token: bytes, status: int, client: str, body: bytes) -> str:
    text = f"response\n{status}\n{client}\n{hashlib.sha256(body).hexdigest()}"
    return hmac.new(token, text.encode(), hashlib.sha256).hexdigest()


def link_key(token: bytes, nonce: str, client: str) -> bytes:
    """Return the key of one link. Each link has its own, so that a frame recorded on one link is worthless on the
    next."""
    return hmac.new(token, f"link\n{nonce}\n{client}".encode(), hashlib.sha256).digest()


def frame_mac(key: bytes, direction: str, sequence: int, payload: bytes) -> bytes:
    """Return 32 hexadecimal digits. Direction and sequence number are covered: a frame can be neither reflected nor
    repeated."""
    mac = hmac.new(key, f"{direction} {sequence} ".encode(), hashlib.sha256)
    mac.update(payload)
    return mac.hexdigest()[:32].encode()


def macs_equal(expected: str, given: str) -> bool:
    """Compare in constant time, and without raising on what a stranger may send."""
    return hmac.compare_digest(expected.encode(), given.encode("utf-8", "surrogateescape"))


def request_headers(token: bytes, method: str, target: str, nonce: str, client: str, body: bytes) -> dict[str, str]:
    return {
        NONCE_HEADER: nonce,
        CLIENT_HEADER: client,
        MAC_HEADER: request_mac(token, method, target, nonce, client, body),
    }


class NonceStore:
    """Nonces that were handed out and not yet used: single use, expiring, bounded.

    A full store forgets its oldest nonce instead of refusing a new one: otherwise a stranger who asks for 35 challenges
    a second would lock everybody out. Nonces for callers that have proved themselves live in a store of their own.
    """

    def __init__(self, limit: int = MAX_NONCES) -> None:
        self._limit = limit
        self._open: OrderedDict[str, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    def issue(self, now: float) -> str:
        self._expire(now)
        while len(self._open) >= self._limit:
            self._open.popitem(last=False)
        nonce = new_nonce()
        self._open[nonce] = now + NONCE_SECONDS
        return nonce

    def age(self, nonce: str, now: float) -> float:
        """Return how many seconds ago a nonce was handed out: what is signed with it is no older. 0.0 for one that is
        not valid."""
        end = self._open.get(nonce)
        return 0.0 if end is None else max(0.0, now - (end - NONCE_SECONDS))

    def take(self, nonce: str, now: float) -> bool:
        """Return True once for each nonce that is still valid."""
        self._expire(now)
        return self._open.pop(nonce, None) is not None

    def _expire(self, now: float) -> None:
        while self._open:
            nonce, end = next(iter(self._open.items()))
            if end > now:
                return
            del self._open[nonce]
