"""Locate an S3 store, make the client that speaks to it, and classify its answers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, urlencode

import boto3
import botocore.exceptions
import botocore.parsers
import urllib3.exceptions
from botocore.config import Config

from everstep.checkpoint.errors import Denied, Full, Missing, StoreError

_SETTINGS = ("endpoint", "region", "profile")

_FULL = {"QuotaExceeded", "InsufficientStorage", "XMinioStorageFull", "XMinioAdminBucketQuotaExceeded"}
_NO_SUCH = {"NoSuchKey", "NoSuchUpload", "404"}  # the last one for a request whose answer has no body
# The status alone does not tell that these may pass: a request that came slowly, bytes that were damaged on their way.
_MAY_PASS = {
    "BadDigest",
    "ConditionalRequestConflict",
    "IncompleteBody",
    "OperationAborted",
    "RequestTimeout",
    "RequestTimeoutException",
    "SlowDown",
    "Throttling",
    "ThrottlingException",
    "XAmzContentChecksumMismatch",
    "XAmzContentSHA256Mismatch",
}
# Of whoever asks, or of the key of an encrypted object, though the status is that of a bad request.
_DENIED = {
    "AuthorizationHeaderMalformed",
    "AuthorizationQueryParametersError",
    "ExpiredToken",
    "ExpiredTokenException",
    "InvalidToken",
    "RequestExpired",
    "TokenRefreshRequired",
}
_DENIED_KEY = "KMS."
_MAY_PASS_STATUS = {408, 425, 429, 500, 502, 503, 504, 509}

# No answer, or a piece of one: nobody knows whether the request was executed.
_BROKEN = (
    botocore.exceptions.ConnectionError,
    botocore.exceptions.HTTPClientError,
    botocore.exceptions.IncompleteReadError,
    botocore.parsers.ResponseParserError,
    urllib3.exceptions.HTTPError,
    ValueError,  # a header that ends early: botocore reads a date from what is left of it
    OSError,
)


class Taken(StoreError):
    """The answer to If-None-Match: there is an object of this name."""


class Unknown(StoreError):
    """The server does not implement the request, or one of its headers."""


class OutOfRange(StoreError):
    """The object ends before the first byte that was asked for."""


@dataclass(frozen=True)
class S3Location:
    """`s3://bucket/prefix?endpoint=…&region=…&profile=…`; the prefix is empty or ends with a slash.

    What the URL leaves out comes from the usual places: AWS_ENDPOINT_URL_S3, AWS_REGION, AWS_PROFILE, ~/.aws/config.
    Credentials are never in a URL, which is logged and kept in manifests: they come from the environment, a profile,
    a web identity token or the machine's role.
    """

    bucket: str
    prefix: str
    endpoint: str | None = None
    region: str | None = None
    profile: str | None = None

    @classmethod
    def parse(cls, url: str) -> S3Location:
        """ValueError if this is no URL of an S3 store."""
        scheme, _, rest = url.partition("://")
        path, _, query = rest.partition("?")
        bucket, _, prefix = path.partition("/")
        if scheme != "s3" or not bucket or "@" in bucket:
            raise ValueError(f"not s3://BUCKET/PREFIX: {url!r}")
        settings = dict(parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query)))
        if unknown := sorted(settings.keys() - set(_SETTINGS)):
            raise ValueError(f"{url!r} has {', '.join(unknown)}; known are {', '.join(_SETTINGS)}")
        prefix = "/".join(segment for segment in prefix.split("/") if segment)
        return cls(bucket, f"{prefix}/" if prefix else "", **settings)

    @property
    def url(self) -> str:
        given = {name: value for name in _SETTINGS if (value := getattr(self, name))}
        query = f"?{urlencode(given, safe=':/')}" if given else ""
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/") + query

    def client(self, *, connections: int, connect_timeout: float, read_timeout: float) -> Any:
        """Return a boto3 client, safe to use from threads. Seconds without an answer after which a call has failed."""
        config = Config(
            connect_timeout=connect_timeout,
            read_timeout=read_timeout,
            max_pool_connections=connections,
            tcp_keepalive=True,
            # Repeated here: whether a repetition is safe depends on what was asked for.
            retries={"total_max_attempts": 1},
            # Checksums are computed here, once for all tries; chunks are verified by their manifest.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        )
        try:
            session = boto3.session.Session(profile_name=self.profile, region_name=self.region)
            return session.client("s3", endpoint_url=self.endpoint, config=config)
        except (botocore.exceptions.BotoCoreError, ValueError) as error:
            raise StoreError(str(error), self.url) from error


@contextmanager
def translate_errors(what: str, where: str) -> Iterator[None]:
    """Turn what boto3 raises into a StoreError, or what of it is known better."""
    try:
        yield
    except botocore.exceptions.ClientError as error:
        raise _classify_error(error, what, where) from error
    except _BROKEN as error:
        raise StoreError(f"cannot {what}: {_get_error_text(error)}", where, may_pass=True) from error
    except botocore.exceptions.BotoCoreError as error:
        # Credentials, profiles, regions: nothing that waiting would mend.
        raise Denied(f"cannot {what}: {error}", where) from error


def _classify_error(error: Any, what: str, where: str) -> StoreError:
    code = str(error.response.get("Error", {}).get("Code", ""))
    status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    if code in _NO_SUCH:
        return Missing(where)
    if status == 412 or code == "PreconditionFailed":
        return Taken("there is one of this name", where)
    if status == 416:
        return OutOfRange("it ends earlier", where)
    text = f"cannot {what}: {error}"
    if status == 501:
        return Unknown(text, where)
    if code in _FULL or status == 507:
        return Full(where, text)
    may_pass = code in _MAY_PASS or status in _MAY_PASS_STATUS
    if not may_pass and (status in (401, 403) or code in _DENIED or code.startswith(_DENIED_KEY)):
        return Denied(text, where)
    return StoreError(text, where, may_pass=may_pass)


def _get_error_text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
