"""Which pages a browser may ask from. Any page can have a browser send a request; one that is not the server's own is
refused before anything is done for it.

Two headers say where a page is from, and a page cannot set either. ``Origin`` names the page's place. ``Host`` names
the place that the browser believes it speaks to: of a server that listens at this machine only, any other name was made
to point here (DNS rebinding). Clients that are no browser send no ``Origin``.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from alcoda.serve.errors import ApiError
from alcoda.serve.settings import ANY, is_origin

LOCAL = frozenset({"localhost", "127.0.0.1", "::1"})
PORTS = {"http": ":80", "https": ":443"}


class Origins:
    """Of one server.

    Args:
        host: where it listens.
        allowed: origins that may ask beside its own; ``*``: any.
    """

    def __init__(self, host: str, allowed: Collection[str]) -> None:
        self.is_any = ANY in allowed
        self.allowed = frozenset(map(str.lower, allowed))
        names = {host.lower(), *(_name(urlsplit(one).netloc) for one in self.allowed)}
        self.names = LOCAL | names if is_loopback(host) and not self.is_any else None
        """That ``Host`` may be; None: any."""

    def check(self, headers: Collection[tuple[bytes, bytes]]) -> None:
        """ApiError (403) where a page may not ask, or the request names another place than this one; (400) where it
        names several."""
        host, origin = (_only(headers, name) for name in (b"host", b"origin"))
        if self.names is not None and host and _name(host) not in self.names:
            raise ApiError(
                403,
                f"the header Host is {host[:80]!r}, and this server listens at this machine only "
                f"({', '.join(sorted(self.names - {''}))}). Behind a proxy, --allow-origin https://NAME allows NAME",
                code="host_not_allowed",
            )
        if not origin or self.is_any or origin in self.allowed or _is_at(origin, host):
            return
        way = f": --allow-origin {origin} lets them" if is_origin(origin) and len(origin) <= 80 else ""
        raise ApiError(
            403, f"pages of the origin {origin[:80]!r} may not ask this server{way}", code="origin_not_allowed"
        )


class Cross(CORSMiddleware):
    """The browser's question before a page's request of another origin; refused in the form of all errors."""

    def preflight_response(self, request_headers: Headers) -> Response:
        found = super().preflight_response(request_headers)
        if found.status_code == 200:
            return found
        kept = {name: value for name, value in found.headers.items() if name not in ("content-length", "content-type")}
        why = bytes(found.body).decode().removeprefix("Disallowed CORS ")
        return ApiError(
            403,
            f"not allowed here: {why}. --allow-origin URL lets an origin ask, by GET and POST with the headers "
            "Authorization and Content-Type",
            code="origin_not_allowed",
            headers=kept,
        ).response()


def _only(headers: Collection[tuple[bytes, bytes]], name: bytes) -> str:
    """What a header says; ApiError (400) where it is there twice: a proxy may have looked at the other one."""
    found = [value for key, value in headers if key == name]
    if len(found) > 1:
        raise ApiError(
            400, f"the header {name.decode().title()} is there {len(found)} times: send one", code="invalid_header"
        )
    return found[0].decode("latin-1").lower() if found else ""


def _name(place: str) -> str:
    """Of ``name:port``, without the port; brackets of an IPv6 address too. Nothing where it is neither."""
    try:
        return (urlsplit(f"//{place}").hostname or "").rstrip(".")
    except ValueError:
        return ""


def _is_at(origin: str, host: str) -> bool:
    """Whether a page came from where its request goes. A proxy may speak TLS for the server: either scheme will do."""
    try:
        scheme, place, *_ = urlsplit(origin)
    except ValueError:
        return False
    port = PORTS.get(scheme)
    return port is not None and bool(place) and place.removesuffix(port) == host.removesuffix(port)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens there."""
    try:
        address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]
        return ipaddress.ip_address(address).is_loopback
    except (OSError, ValueError):  # `Server.open` says that there is no such host
        return False
