"""Where media come from: a locator and a policy in, bytes, a path or an open picture out.

A ``str`` is always a URL and never falls through to a path. HTTP goes to an address that was
checked and is then kept (no second look-up), every redirect is checked anew, and nothing is read
beyond the byte cap. The standard library's client is used because only it lets a connection be
pinned without a dependency. No proxy settings are honoured: the checks would hold for the proxy.

``data:`` URLs are read in ``data_uri.py``. What the bytes are is decided elsewhere (``sniff.py``,
``image.py``, ``video.py``).
"""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import os
import socket
import ssl
import stat
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias
from urllib.parse import SplitResult, unquote, urljoin, urlsplit

from PIL import Image

from k3vl.errors import MediaError
from k3vl.vision.data_uri import decode_data_uri

if TYPE_CHECKING:
    from k3vl.types import MediaKind, MediaSource

Resolved: TypeAlias = bytes | Path | Image.Image
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_CHUNK = 1 << 16
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
# All that IANA has given out for public use; what lies outside is old, local or translated.
_PUBLIC_IPV6 = ipaddress.ip_network("2000::/3")


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchPolicy:
    """What may be fetched, and at what cost.

    Attributes:
        schemes: URL schemes that are accepted; ``file`` also needs ``file_root``.
        file_root: directory under which ``file:`` URLs may point, links followed.
        max_bytes: largest media file; local clips are exempt, they have limits of their own.
        connect_seconds, read_seconds: longest wait for a connection, for the next piece.
        total_seconds: longest whole fetch, redirects included (name look-up excluded).
        max_redirects: hops after the first request.
        allow_private_networks: also loopback, private, link-local and the like.
        user_agent: sent with every request; some hosts refuse an empty one.
    """

    schemes: frozenset[str] = frozenset({"data", "http", "https"})
    file_root: Path | None = None
    max_bytes: int = 256 * 2**20
    connect_seconds: float = 5.0
    read_seconds: float = 15.0
    total_seconds: float = 60.0
    max_redirects: int = 3
    allow_private_networks: bool = False
    user_agent: str = "k3vl (media fetcher)"


DEFAULT_POLICY = FetchPolicy()
"""``data:`` and public ``http(s):``; no files by URL."""


class Abort:
    """Lets another thread break off a fetch: its sockets are shut down, and no more are used."""

    def __init__(self) -> None:
        """Nothing is under way."""
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._is_called = False

    def __call__(self) -> None:
        """Break off; the fetch fails soon."""
        with self._lock:
            self._is_called = True
            if self._socket is not None:
                _abort(self._socket)

    def watch(self, sock: socket.socket) -> None:
        """A socket that the fetch is about to use."""
        with self._lock:
            self._socket = sock
            if self._is_called:
                _abort(sock)


def resolve(
    source: MediaSource, kind: MediaKind, policy: FetchPolicy, abort: Abort | None = None
) -> Resolved:
    """Turn a source into bytes, a checked local path, or the PIL image that was given.

    Raises:
        MediaError: codes ``<kind>_fetch_failed``, ``<kind>_empty``, ``media_too_large``,
            ``media_not_found``, ``url_invalid``, ``url_forbidden``, ``data_uri_invalid``.
    """
    if isinstance(source, Image.Image):
        return source
    if isinstance(source, bytes | bytearray | memoryview):
        return _capped(bytes(source), kind, policy)
    if isinstance(source, os.PathLike):
        return _local(Path(source), kind, policy)
    if isinstance(source, str):
        return _from_url(source.strip(), kind, policy, abort or Abort())
    raise MediaError(
        f"{kind}: a source is a URL, a path, bytes or a PIL image, not {type(source).__name__}",
        code="source_invalid",
    )


def _capped(data: bytes, kind: MediaKind, policy: FetchPolicy) -> bytes:
    """Refuse nothing and too much."""
    if not data:
        raise MediaError(f"{kind}: the file is empty (0 bytes)", code=f"{kind}_empty")
    if len(data) > policy.max_bytes:
        raise _too_large(kind, len(data), policy)
    return data


def _too_large(kind: MediaKind, size: int, policy: FetchPolicy) -> MediaError:
    return MediaError(
        f"{kind}: {size} bytes, at most {policy.max_bytes} are accepted", code="media_too_large"
    )


def _from_url(url: str, kind: MediaKind, policy: FetchPolicy, abort: Abort) -> Resolved:
    """Dispatch on the scheme; anything that is not a URL says so."""
    scheme, colon, _ = url[:32].partition(":")
    scheme = scheme.lower()
    if not colon or not scheme.isalnum() or len(scheme) < 2:
        raise MediaError(
            f"{kind}: not a URL; a string is a data:, http: or https: URL (raw base64 needs "
            "'data:image/png;base64,' in front, a local file is given as a path)",
            code="url_invalid",
        )
    if scheme not in policy.schemes or (scheme == "file" and policy.file_root is None):
        raise MediaError(f"{kind}: '{scheme}:' URLs are not accepted here", code="url_forbidden")
    if scheme == "data":
        return _capped(decode_data_uri(url, kind, policy.max_bytes), kind, policy)
    if scheme == "file":
        return _file_url(url, kind, policy)
    if scheme in ("http", "https"):
        return _capped(_fetch(url, kind, policy, abort), kind, policy)
    raise MediaError(f"{kind}: nothing can fetch '{scheme}:' URLs", code="url_forbidden")


# ---------------------------------------------------------------------- files


def _local(path: Path, kind: MediaKind, policy: FetchPolicy) -> Path:
    """A regular, non-empty file; a local clip may be larger than memory, it is never read whole."""
    name = _shown(path)
    try:
        info = path.stat()
    except (OSError, ValueError) as exc:
        reason = "no such file" if isinstance(exc, FileNotFoundError) else "cannot be read"
        raise MediaError(f"{name}: {reason}", code="media_not_found") from exc
    if stat.S_ISDIR(info.st_mode):
        raise MediaError(f"{name}: is a directory, not a file", code="media_not_found")
    if not stat.S_ISREG(info.st_mode):
        raise MediaError(f"{name}: not a regular file", code="media_not_found")
    if info.st_size == 0:
        raise MediaError(f"{name}: the file is empty (0 bytes)", code=f"{kind}_empty")
    if kind == "image" and info.st_size > policy.max_bytes:
        raise _too_large(kind, info.st_size, policy)
    return path


def _shown(path: Path) -> str:
    """A file's name for a message of one line; what is not printable is escaped."""
    name = path.name or str(path)
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in name)


def read_path(path: Path, limit: int | None = None) -> bytes:
    """Read a checked path, or its first ``limit`` bytes.

    Raises:
        MediaError: ``media_not_found``.
    """
    try:
        with path.open("rb") as file:
            return file.read(-1 if limit is None else limit)
    except OSError as exc:
        raise MediaError(f"{_shown(path)}: cannot be read", code="media_not_found") from exc


def _file_url(url: str, kind: MediaKind, policy: FetchPolicy) -> Path:
    """A file below the root; a missing, a forbidden and an outside one look the same."""
    denied = MediaError(f"{kind}: this file URL cannot be used", code="url_forbidden")
    assert policy.file_root is not None
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost"):
        raise denied
    try:
        root = policy.file_root.resolve(strict=True)
        path = Path(unquote(parts.path)).resolve(strict=True)
        allowed = path.is_relative_to(root) and os.access(path, os.R_OK) and path.is_file()
    except (OSError, ValueError, RuntimeError):
        raise denied from None
    if not allowed:
        raise denied
    return _local(path, kind, policy)


# ---------------------------------------------------------------------- http(s):


def _fetch(url: str, kind: MediaKind, policy: FetchPolicy, abort: Abort) -> bytes:
    """Follow a URL through at most ``max_redirects`` checked hops."""
    deadline = time.monotonic() + policy.total_seconds
    parts = _parse_http(url, kind)
    for _ in range(policy.max_redirects + 1):
        body_or_location = _hop(parts, kind, policy, deadline, abort)
        if isinstance(body_or_location, bytes):
            return body_or_location
        following = _parse_http(body_or_location, kind, base=parts.geturl())
        if parts.scheme == "https" and following.scheme == "http":
            raise MediaError(f"{kind}: redirected from https to http", code="url_forbidden")
        if following.scheme not in policy.schemes:
            raise MediaError(f"{kind}: redirected to '{following.scheme}:'", code="url_forbidden")
        parts = following
    raise _failed(kind, f"more than {policy.max_redirects} redirects")


def _failed(kind: MediaKind, why: str) -> MediaError:
    return MediaError(f"{kind}: fetch failed: {why}", code=f"{kind}_fetch_failed")


def _parse_http(url: str, kind: MediaKind, base: str = "") -> SplitResult:
    """Split a URL with the one parser used for the check and for the connection."""
    bad = MediaError(f"{kind}: the URL is not valid", code="url_invalid")
    if "\\" in url or any(c.isspace() or not c.isprintable() for c in url):
        raise bad
    try:
        parts = urlsplit(urljoin(base, url))
        host, _ = parts.hostname, parts.port
    except ValueError:
        raise bad from None
    if parts.scheme not in ("http", "https"):
        raise MediaError(f"{kind}: the URL is not http or https", code="url_forbidden")
    if not host or "@" in parts.netloc or "%" in host:
        raise bad
    return parts


def _hop(
    parts: SplitResult, kind: MediaKind, policy: FetchPolicy, deadline: float, abort: Abort
) -> bytes | str:
    """One request: its body, or where it redirects to."""
    host = parts.hostname
    assert host is not None
    port = parts.port or (443 if parts.scheme == "https" else 80)
    connection = http.client.HTTPConnection(host, port)
    try:
        connection.sock = _connect(host, port, kind, policy, tls=parts.scheme == "https")
        abort.watch(connection.sock)
        # A drip of single bytes never trips the socket's own timeout.
        watchdog = threading.Timer(max(deadline - time.monotonic(), 0.0), _abort, [connection.sock])
        watchdog.daemon = True
        watchdog.start()
        try:
            answer = _exchange(connection, parts, kind, policy)
        finally:
            watchdog.cancel()
        if time.monotonic() >= deadline:  # an end that the watchdog made is not the body's end
            raise TimeoutError
    except (OSError, http.client.HTTPException, ValueError) as exc:
        why = "timed out" if time.monotonic() >= deadline else _describe(exc)
        raise _failed(kind, why) from exc
    finally:
        connection.close()
    return answer


def _abort(sock: socket.socket) -> None:
    """Wake a blocked read."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def _describe(exc: Exception) -> str:
    """What went wrong, without addresses or the peer's words."""
    if isinstance(exc, TimeoutError):
        return "timed out"
    if isinstance(exc, ssl.SSLError):
        return "TLS failed (certificate or protocol)"
    if isinstance(exc, ConnectionRefusedError):
        return "connection refused"
    if isinstance(exc, http.client.HTTPException | ValueError):
        return "not a valid HTTP answer"
    return "connection broken"


def _connect(
    host: str, port: int, kind: MediaKind, policy: FetchPolicy, *, tls: bool
) -> socket.socket:
    """Look the name up once, check every address, connect to a checked one."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as exc:
        raise _failed(kind, "the host name cannot be resolved") from exc
    addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
    if not policy.allow_private_networks and not all(map(is_public_address, addresses)):
        raise MediaError(
            f"{kind}: the URL's host is not on the public internet", code="url_forbidden"
        )
    error: OSError = ConnectionRefusedError()
    for address in addresses:
        try:
            sock = socket.create_connection((address, port), timeout=policy.connect_seconds)
        except OSError as exc:
            error = exc
            continue
        sock.settimeout(policy.read_seconds)
        if not tls:
            return sock
        try:
            return ssl.create_default_context().wrap_socket(sock, server_hostname=host)
        except OSError:
            sock.close()
            raise
    raise error


def is_public_address(address: str) -> bool:
    """Whether an IP address is one that strangers may be sent to.

    IPv4 inside IPv6 (mapped, 6to4, Teredo, NAT64) is judged by the inner address.
    """
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None)
        if inner is None and ip in _NAT64:
            inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if inner is not None:
            ip = inner
        elif ip not in _PUBLIC_IPV6:
            return False
    return ip.is_global and not ip.is_multicast


def _exchange(
    connection: http.client.HTTPConnection,
    parts: SplitResult,
    kind: MediaKind,
    policy: FetchPolicy,
) -> bytes | str:
    """Send the request on the pinned connection and read the answer up to the cap."""
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    connection.putrequest("GET", _ascii(target), skip_host=True, skip_accept_encoding=True)
    host = parts.netloc.encode("idna").decode() if not parts.netloc.isascii() else parts.netloc
    headers = {
        "Host": host,
        "User-Agent": policy.user_agent,
        "Accept": "image/*,video/*,*/*;q=0.5",
        "Accept-Encoding": "identity",
        "Connection": "close",
    }
    for name, value in headers.items():
        connection.putheader(name, value)
    connection.endheaders()
    with connection.getresponse() as response:
        if response.status in _REDIRECTS:
            location = response.getheader("Location")
            if not location:
                raise _failed(kind, f"HTTP {response.status} without a location")
            return location
        if response.status != 200:
            raise _failed(kind, f"HTTP {response.status}")
        if response.getheader("Content-Encoding", "identity").lower() != "identity":
            raise _failed(kind, "the server sent a compressed answer that was not asked for")
        return _read_body(response, kind, policy)


def _ascii(target: str) -> str:
    """Percent-encode what a browser would."""
    return "".join(
        c if c.isascii() else "".join(f"%{byte:02X}" for byte in c.encode()) for c in target
    )


def _read_body(response: http.client.HTTPResponse, kind: MediaKind, policy: FetchPolicy) -> bytes:
    """Stream the body; stop one byte past the cap."""
    declared = response.length
    if declared is not None and declared > policy.max_bytes:
        raise _too_large(kind, declared, policy)
    body = bytearray()
    while chunk := response.read1(_CHUNK):
        body += chunk
        if len(body) > policy.max_bytes:
            raise MediaError(
                f"{kind}: more than {policy.max_bytes} bytes, no more are accepted",
                code="media_too_large",
            )
    if declared is not None and len(body) < declared:
        raise _failed(kind, f"the connection ended after {len(body)} of {declared} bytes")
    return bytes(body)
