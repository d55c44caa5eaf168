"""HTTP sessions to the API server, for the client's requests and for watches."""

from __future__ import annotations

import contextlib
import ipaddress
import ssl
import urllib.request
from urllib.parse import urlsplit

import aiohttp
from kubernetes.aio.client import Configuration

USER_AGENT = "everstep-operator"


def open_api_session(configuration: Configuration) -> aiohttp.ClientSession:
    """Return a session with the credentials of a configuration. Each request asks for the token anew: tokens expire.

    The proxy of the environment is looked up once. aiohttp would do it for each request in another thread
    (`trust_env`), and look for a password of the server's in ~/.netrc: more of the processor than the request itself.
    """

    context = _make_tls_context(configuration)

    async def authorize(request: aiohttp.ClientRequest, send: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
        token = await configuration.get_api_key_with_prefix("BearerToken", alias="authorization")
        if token:
            request.headers["Authorization"] = token
        if configuration.tls_server_name:
            request.server_hostname = configuration.tls_server_name
        try:
            return await send(request)
        except aiohttp.ClientConnectorCertificateError:
            # The kubelet has mounted the authority of today since. A process that holds the Lease would end without an
            # answer and read it; one that stands by would wait for ever.
            if not _load_authority(context, configuration):
                raise
            return await send(request)

    return aiohttp.ClientSession(
        # Without a limit: the Lease is renewed on a connection of the same pool. `fair_share` bounds what is in flight.
        connector=aiohttp.TCPConnector(limit=0, ssl=context),
        headers={"User-Agent": USER_AGENT},
        middlewares=(authorize,),
        proxy=configuration.proxy or find_proxy(configuration.host),
        read_bufsize=2**21,  # an event of a watch is one line
    )


def find_proxy(url: str) -> str | None:
    """Return the proxy that the environment (HTTPS_PROXY, NO_PROXY …) names for a URL."""
    parts = urlsplit(url)
    if parts.hostname is None or urllib.request.proxy_bypass(parts.hostname) or _is_in_bypassed_network(parts.hostname):
        return None
    found = urllib.request.getproxies().get(parts.scheme)
    return f"http://{found}" if found and "://" not in found else found  # as programs in Go read "proxy:3128"


def _is_in_bypassed_network(host: str) -> bool:
    """Return whether NO_PROXY has a network with this address, as clusters write it ("10.0.0.0/8") and all programs in
    Go read it. Python compares names alone."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    for each in urllib.request.getproxies().get("no", "").split(","):
        with contextlib.suppress(ValueError):
            if "/" in each and address in ipaddress.ip_network(each.strip(), strict=False):
                return True
    return False


def _load_authority(context: ssl.SSLContext, configuration: Configuration) -> bool:
    """Add what the file of certificate authorities has now; return whether any of it is new."""
    before = len(context.get_ca_certs())
    with contextlib.suppress(OSError):  # also a file that is no certificate at the moment
        if configuration.ssl_ca_cert:
            context.load_verify_locations(configuration.ssl_ca_cert)
    return len(context.get_ca_certs()) > before


def _make_tls_context(configuration: Configuration) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=configuration.ssl_ca_cert)
    if configuration.cert_file:
        context.load_cert_chain(configuration.cert_file, configuration.key_file)
    if not configuration.verify_ssl:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if configuration.disable_strict_ssl_verification:
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context
