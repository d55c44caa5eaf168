"""The errors of requests to the API server. Each one that the operator reacts to differently is a class of its own."""

from __future__ import annotations

import re
from typing import Any


class ApiError(Exception):
    """The API server answered, and the answer was no."""

    def __init__(self, code: int, reason: str, message: str, *, retry_after: float | None = None) -> None:
        super().__init__(f"{code} {reason}: {message}")
        self.code = code
        self.reason = reason
        self.message = message
        self.retry_after = retry_after


class NotFound(ApiError):
    """404: the object (or its namespace) is not there."""


class AlreadyExists(ApiError):
    """409 on a create: the name is taken, by us or by somebody else. Read the object before believing either."""


class Conflict(ApiError):
    """409 otherwise: a stale resourceVersion, or a UID that is no longer the one we meant."""


class Gone(ApiError):
    """410: a `continue` token or resourceVersion that the server has compacted away."""


class Invalid(ApiError):
    """422 or 400: the body is refused and will be refused again."""


class TooLarge(Invalid):
    """The object is larger than the API server takes (3 MiB, 413) or etcd stores (1.5 MiB, which is told as a 500).

    Taken for a server in trouble it would be sent again and again, and its users would never hear of it.
    """

    def __init__(self, code: int, reason: str, message: str, *, retry_after: float | None = None) -> None:
        hint = "shorten spec.podTemplate, spec.env, spec.args or the annotations: etcd stores objects up to 1.5 MiB"
        super().__init__(code, reason, f"{message}; {hint}", retry_after=retry_after)


class NotAuthorized(ApiError):
    """403 by RBAC: our rights, never a job's fault.

    An API server that has just started answers so for a moment, until it has read the roles. Taken for a verdict on
    the pods, each restart of a control plane would fail jobs.
    """


class Forbidden(ApiError):
    """403 by admission. A used-up quota is `QuotaExceeded`: that one ends by waiting."""


class QuotaExceeded(Forbidden):
    """403 by a ResourceQuota: not the template's fault, and true only until somebody frees some, or until what is used
    is counted: a quota that is new, or has been edited, is not enforced but closed before."""


class AdmissionNotReady(ApiError):
    """403 by an admission plug-in that cannot judge at this time: its API server has just started, or its own lookups
    fail; 409 by one that has met another writer of a quota. Nothing was stored.

    Taken for a verdict on the pods, each restart of a control plane would fail new jobs.
    """


class Unauthorized(ApiError):
    """401: the token has expired, or was never valid."""


class TooManyRequests(ApiError):
    """429: certainly not processed."""


class ServerError(ApiError):
    """5xx: may or may not have been processed."""


class Undeclared(ApiError):
    """500 of an apply that has fields of which the CRD knows nothing. Nothing was stored."""


class WebhookUnavailable(ApiError):
    """500 in the name of an admission webhook that cannot be reached, or does not answer in time; 429 of one that asks
    to try later.

    Nothing was stored, and nothing is wrong with the server. Taken for a server in trouble, it would be told to nobody,
    and a job that waits for the webhook would end for want of nodes.
    """


class Unreachable(Exception):
    """No answer: refused, reset, or timed out.

    `sent` tells whether the request may have reached the server. If it may, a create can have happened unseen, and
    sending it again would report our own object as somebody else's.
    """

    def __init__(self, message: str, *, sent: bool) -> None:
        super().__init__(message)
        self.sent = sent


class NotOurs(Exception):
    """An object with the name we need exists and belongs to something else. It is never adopted."""

    def __init__(self, what: str, owner: str) -> None:
        super().__init__(f"{what} already exists and belongs to {owner}")
        self.what = what
        self.owner = owner


class AgentGone(NotOurs):
    """The ConfigMap with the agent that a job's pods run is gone, and only an older operator had that agent."""

    def __init__(self, what: str) -> None:
        Exception.__init__(
            self,
            f"{what} is gone, with the agent of an older operator that the pods of this job run: create it again, or "
            "suspend and resume the job, whose pods then run the present agent",
        )
        self.what, self.owner = what, "nobody"


# `pods is forbidden: User "x" cannot create resource "pods" in API group …`; admission names the object instead.
_BY_RBAC = re.compile(r'User "[^"]*" cannot \w+ (resource|path)')
# A webhook chooses the code of its denial freely; the API server puts these words before its message.
_BY_WEBHOOK = re.compile(r'admission webhook "[^"]*" denied the request')
_UNDECLARED = re.compile(r": field not declared in schema")
_BY_QUOTA = re.compile(r"exceeded quota|status unknown for quota")
# Admission counts what is used in the quota's status, which others write too.
_BY_QUOTAS_OWN_CONFLICT = re.compile(r"cannot be fulfilled on resourcequotas")
# The last two of ImagePolicyWebhook, whose backend is unavailable.
_NOT_READY = re.compile(
    r"is forbidden: (not yet ready to handle request|unable to \w+ .* at this time because|"
    r'Post "https?://|an error on the server )'
)
_WITHOUT_WEBHOOK = re.compile(r"failed calling webhook")
# Of etcd, and of the connection to it.
_BY_ETCD = re.compile(r"etcdserver: request is too large|message larger than max")

# Go's own server, of a path that the API server does not have: a kind that no CRD declares yet.
_NO_SUCH_PATH = "404 page not found"
_VERDICTS = frozenset({400, 403, 404, 409, 422})  # codes by which something of a job is decided

_BY_CODE: dict[int, type[ApiError]] = {
    400: Invalid,
    401: Unauthorized,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    410: Gone,
    413: TooLarge,
    422: Invalid,
    429: TooManyRequests,
}


def from_status(code: int, status: Any, *, retry_after: float | None = None) -> ApiError:
    """Return the typed error for an HTTP code and the `Status` object (or whatever a proxy sent instead) in its body.

    Args:
        code: The HTTP status.
        status: The decoded body.
        retry_after: Seconds of the header Retry-After, if there was one.
    """
    known = status if isinstance(status, dict) else {}
    reason = str(known.get("reason") or code)
    message = str(known.get("message") or status or "")[:2048]
    if code in _VERDICTS and known.get("kind") != "Status" and not message.startswith(_NO_SUCH_PATH):
        return ServerError(code, reason, message)  # of something before the API server, which knows nothing of jobs
    if _BY_WEBHOOK.match(message) and code == 429:
        return WebhookUnavailable(code, reason, message)
    if _BY_WEBHOOK.match(message) and code not in (400, 403, 413, 422):
        return Forbidden(code, reason, message)  # not taken for an object that is gone or there, or a server in trouble
    if code == 409 and _BY_QUOTAS_OWN_CONFLICT.search(message):
        return AdmissionNotReady(code, reason, message)
    if code == 409 and reason == "AlreadyExists":
        return AlreadyExists(code, reason, message)
    if code == 403 and _BY_QUOTA.search(message):  # the server gives no reason of its own for it
        return QuotaExceeded(code, reason, message)
    if code == 403 and _NOT_READY.search(message):
        return AdmissionNotReady(code, reason, message)
    if code == 403 and _BY_RBAC.search(message):
        return NotAuthorized(code, reason, message)
    if code == 403 and "is being terminated" in message:
        # Creates in a terminating namespace. The template is not to blame, and the job is about to be deleted too.
        return Conflict(code, reason, message)
    if code >= 500 and _BY_ETCD.search(message):
        return TooLarge(code, reason, message)
    if code >= 500 and _UNDECLARED.search(message):
        return Undeclared(code, reason, message)
    if code >= 500 and _WITHOUT_WEBHOOK.search(message):
        return WebhookUnavailable(code, reason, message)
    kind = _BY_CODE.get(code, ServerError if code >= 500 else ApiError)
    return kind(code, reason, message, retry_after=retry_after)
