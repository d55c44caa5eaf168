"""A blocking client of a leader, for the command line and for tests. Standard library only."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

from . import auth

MAX_ANSWER_BYTES = 8 * 1024 * 1024


class LeaderError(Exception):
    """The leader refused; `status` is its HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status} {message}")
        self.status = status


class NotAuthentic(LeaderError):
    """The answer was not made by someone who holds the token."""


class LeaderClient:
    """One connection to a leader. Not safe for threads; raises OSError when the leader is out of reach."""

    def __init__(self, address: str, token: bytes, timeout: float = 10.0) -> None:
        """Make a client of the leader at `address` ("ip:port"); `timeout` in seconds is for everything but a long
        poll's own wait."""
        host, _, port = address.rpartition(":")
        self._connection = http.client.HTTPConnection(host.strip("[]"), int(port), timeout=timeout)
        self._token = token
        self._timeout = timeout
        self._nonce: str | None = None

    def state(
        self, after: str = "", wait: float = 0.0, charged: str = "", allowance: int | None = None
    ) -> dict[str, Any]:
        """Return the leader's state, once it is no longer `after`.

        Args:
            after: The state known already, "incarnation:version"; empty for none.
            wait: Seconds after which the state is returned in any case.
            charged: The newest generation that was charged, "epoch.generation".
            allowance: Application restarts left after `charged`; None grants nothing.
        """
        query: dict[str, Any] = {"after": after, "wait": wait, "charged": charged}
        if allowance is not None:
            query["allowance"] = allowance
        return self._call("GET", f"/v1/state?{urlencode(query)}", None, wait)

    def peers(self, epoch: int, addresses: Mapping[int, str]) -> None:
        self._call("POST", "/v1/peers", {"epoch": epoch, "addresses": {str(i): a for i, a in addresses.items()}})

    def stop(self, reason: str) -> None:
        self._call("POST", "/v1/stop", {"reason": reason})

    def close(self) -> None:
        self._connection.close()

    def _call(self, method: str, target: str, data: Any, wait: float = 0.0) -> dict[str, Any]:
        body = b"" if data is None else json.dumps(data).encode()
        for last in (False, True):
            fresh = self._nonce is None
            try:
                return self._once(method, target, body, wait)
            except LeaderError as error:
                # A kept nonce or connection may have expired meanwhile; every request here may be repeated.
                if last or fresh or error.status != 401:
                    raise
            except (OSError, http.client.HTTPException):
                if last or fresh:
                    raise
            self._forget()
        raise AssertionError("unreachable")

    def _once(self, method: str, target: str, body: bytes, wait: float) -> dict[str, Any]:
        nonce, client = self._nonce or self._challenge(), auth.new_nonce()
        self._nonce = None
        headers = auth.request_headers(self._token, method, target, nonce, client, body)
        try:
            self._connect(self._timeout + wait)
            self._connection.request(method, target, body, headers)
            response = self._connection.getresponse()
            answer = response.read(MAX_ANSWER_BYTES)
        except BaseException:
            self._forget()
            raise
        mac = response.getheader(auth.MAC_HEADER, "")
        authentic = auth.macs_equal(auth.response_mac(self._token, response.status, client, answer), mac)
        if response.status != 200:
            raise LeaderError(response.status, _read_error(answer) if authentic else response.reason)
        if not authentic:
            raise NotAuthentic(response.status, "the answer is not authentic")
        self._nonce = response.getheader(auth.NEXT_NONCE_HEADER)
        result: dict[str, Any] = json.loads(answer)
        return result

    def _challenge(self) -> str:
        try:
            self._connect(self._timeout)
            self._connection.request("GET", "/v1/challenge")
            response = self._connection.getresponse()
            data = json.loads(response.read(4096))
            return str(data["nonce"])
        except (ValueError, KeyError, TypeError) as error:
            self._forget()
            raise NotAuthentic(0, "no challenge") from error
        except BaseException:
            self._forget()
            raise

    def _connect(self, timeout: float) -> None:
        self._connection.timeout = timeout
        if self._connection.sock is None:
            self._connection.connect()
        self._connection.sock.settimeout(timeout)

    def _forget(self) -> None:
        self._nonce = None
        self._connection.close()


def _read_error(answer: bytes) -> str:
    try:
        return str(json.loads(answer)["error"])
    except (ValueError, KeyError, TypeError):
        return ""
