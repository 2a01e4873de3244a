"""Locators: data URIs in all their forms, files, and HTTP against a local server."""

import base64
import contextlib
import http.server
import io
import socket
import threading
import time
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest
from PIL import Image

from k3vl.config import K3_MEDIA
from k3vl.errors import MediaError
from k3vl.vision.data_uri import decode_data_uri
from k3vl.vision.processor import MediaProcessor
from k3vl.vision.source import DEFAULT_POLICY, FetchPolicy, is_public_address, resolve
from tests.timing import cpu_limit
from tests.vision.files import encode

PNG = encode(Image.new("RGB", (8, 8), (1, 2, 3)))
B64 = base64.b64encode(PNG).decode()


def code(source, policy=DEFAULT_POLICY, kind="image"):
    with pytest.raises(MediaError) as info:
        resolve(source, kind, policy)
    return info.value.code


# ---------------------------------------------------------------------- data:

SAFE = base64.urlsafe_b64encode(bytes(range(256))).decode()


@pytest.mark.parametrize(
    "uri",
    [
        f"data:image/png;base64,{B64}",
        f"data:image/png;base64,{B64.rstrip('=')}",  # R21, I53
        f"  data:image/png;base64, {B64[:40]}\n {B64[40:]}\r\n",
        f"DATA:image/PNG;BASE64,{B64}",
        f"data:image/png;charset=utf-8;base64,{B64}",
        f"data:image/png;name=a.png;base64;x=y,{B64}",
        f"data:image/jpeg;base64,{B64}",  # I31
        f"data:;base64,{B64}",
        f"data:application/octet-stream;base64,{B64}",
        "data:image/png;base64," + B64.replace("+", "%2B").replace("/", "%2F").replace("=", "%3D"),
        "data:image/png;base64," + B64.replace("+", "-").replace("/", "_"),
    ],
)
def test_data_uris_as_clients_write_them(uri):
    assert resolve(uri, "image", DEFAULT_POLICY) == PNG
    assert MediaProcessor(K3_MEDIA).process(uri).layout.width == 8


def test_url_safe_alphabet():
    assert "-" in SAFE
    assert resolve("data:;base64," + SAFE.rstrip("="), "image", DEFAULT_POLICY) == bytes(range(256))


@pytest.mark.parametrize(
    ("uri", "expected"),
    [
        ("data:image/png,rawtext", "data_uri_invalid"),
        ("data:image/svg+xml;utf8,<svg/>", "data_uri_invalid"),
        ("data:image/png;base64", "data_uri_invalid"),
        ("data:image/png;base64,!!!!", "data_uri_invalid"),
        ("data:image/png;base64,AAAAA", "data_uri_invalid"),
        ("data:image/png;base64,", "image_empty"),
        ("data:image/png;base64, \n", "image_empty"),
        (B64, "url_invalid"),
        ("/etc/passwd", "url_invalid"),
        ("photo.jpg", "url_invalid"),
        ("", "url_invalid"),
        ("C:\\photo.jpg", "url_invalid"),
        ("ftp://host/a.png", "url_forbidden"),
        ("file:///etc/passwd", "url_forbidden"),
        ("javascript:alert(1)", "url_forbidden"),
    ],
)
def test_what_is_no_usable_url_is_refused(uri, expected):
    assert code(uri) == expected


LONG = np.random.default_rng(0).bytes(200_000)
"""Several of the pieces that a URL is decoded in, whose borders fall anywhere."""


@pytest.mark.parametrize("size", [len(LONG), len(LONG) - 1, len(LONG) - 2])
@pytest.mark.parametrize(
    "written",
    [
        lambda data: base64.b64encode(data).decode(),
        lambda data: base64.encodebytes(data).decode().replace("\n", "\r\n"),
        lambda data: base64.urlsafe_b64encode(data).decode().rstrip("="),
        lambda data: quote(base64.b64encode(data).decode(), safe=""),
        lambda data: "".join(f"%{ord(c):02x}" for c in base64.b64encode(data).decode()),
        lambda data: "\n" + " " * 10_000 + base64.b64encode(data).decode(),
    ],
)
def test_long_data_uris(written, size):
    uri = "data:;base64," + written(LONG[:size])
    for form in (uri, bytearray(uri.encode())):
        assert decode_data_uri(form, "image", size) == LONG[:size]
        with pytest.raises(MediaError, match="too long"):
            decode_data_uri(form, "image", size - 1)


@pytest.mark.parametrize(
    "payload",
    [
        "A" * 100_000 + "=" + "A" * 100_000,
        "A" * 99_999 + "=" * 80_000 + "A",
        "A" * 100_000 + "!",
        "A" * 100_000 + "ä",
        "A" * 100_000 + "%4",
        "A" * 65_535 + "%",
        "A" * 100_001,
    ],
)
def test_long_nonsense(payload):
    assert code("data:;base64," + payload) == "data_uri_invalid"
    with pytest.raises(MediaError, match="not valid base64"):
        decode_data_uri(bytearray(f"data:;base64,{payload}".encode()), "image", 2**20)


def test_the_header_of_a_data_uri_is_short():
    assert code("data:" + ";" * 5000 + ";base64,AAAA") == "data_uri_invalid"


def test_errors_do_not_repeat_the_payload():
    with pytest.raises(MediaError) as info:
        resolve("data:image/png;base64,SECRET!!", "image", DEFAULT_POLICY)
    assert "SECRET" not in str(info.value)


def test_frame_lists_are_refused_before_decoding():  # R31, V40, V41
    frame = base64.b64encode(encode(Image.new("RGB", (64, 64)), "JPEG")).decode()
    uri = "data:video/jpeg;base64," + ",".join([frame] * 5000)
    with cpu_limit(0.5):
        assert code(uri, kind="video") == "frame_list_unsupported"


def test_concatenated_jpegs_are_no_video():  # R31, V40
    data = encode(Image.new("RGB", (64, 64)), "JPEG") * 5000
    uri = "data:video/jpeg;base64," + base64.b64encode(data).decode()
    with cpu_limit(1.0), pytest.raises(MediaError) as info:
        MediaProcessor(K3_MEDIA).process(uri, "video")
    assert info.value.code == "image_as_video"


def test_size_is_checked_before_decoding():
    small = FetchPolicy(max_bytes=100)
    assert code("data:;base64," + "A" * 137, small) == "media_too_large"
    assert code("data:;base64," + "%41" * 137, small) == "media_too_large"
    assert code("data:;base64," + "A" * 10_000, small) == "media_too_large"
    assert len(resolve("data:;base64," + "A" * 132, "image", small)) == 99


# ---------------------------------------------------------------------- bytes, paths, pictures


def test_bytes_paths_and_pictures_pass_through(tmp_path):
    path = tmp_path / "a.png"
    path.write_bytes(PNG)
    picture = Image.new("RGB", (2, 2))
    assert resolve(PNG, "image", DEFAULT_POLICY) == PNG
    assert resolve(bytearray(PNG), "image", DEFAULT_POLICY) == PNG
    assert resolve(path, "image", DEFAULT_POLICY) == path
    assert resolve(picture, "image", DEFAULT_POLICY) is picture


def test_local_files_that_cannot_be_used(tmp_path):
    (tmp_path / "empty.jpg").touch()
    (tmp_path / "big.jpg").write_bytes(b"x" * 11)
    assert code(tmp_path / "empty.jpg") == "image_empty"  # I33
    assert code(tmp_path / "empty.jpg", kind="video") == "video_empty"
    assert code(tmp_path / "missing.jpg") == "media_not_found"
    assert code(tmp_path / "nul\0.jpg") == "media_not_found"
    assert code(tmp_path) == "media_not_found"
    assert code(Path("/dev/zero")) == "media_not_found"
    assert code(tmp_path / "big.jpg", FetchPolicy(max_bytes=10)) == "media_too_large"
    assert resolve(tmp_path / "big.jpg", "video", FetchPolicy(max_bytes=10)).name == "big.jpg"
    assert code(b"x" * 11, FetchPolicy(max_bytes=10)) == "media_too_large"
    assert code(b"") == "image_empty"


@pytest.mark.parametrize("source", [None, 7, ["a"], io.BytesIO(b"x")])
def test_other_types_are_refused_without_their_repr(source):
    with pytest.raises(MediaError, match=f"not {type(source).__name__}$"):
        resolve(source, "image", DEFAULT_POLICY)


def test_file_urls_only_below_the_root(tmp_path):
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    (root / "a b.png").write_bytes(PNG)
    (outside / "secret.png").write_bytes(PNG)
    (root / "link.png").symlink_to(outside / "secret.png")
    policy = FetchPolicy(schemes=frozenset({"file"}), file_root=root)
    assert resolve(f"file://{root}/a%20b.png", "image", policy) == root / "a b.png"
    assert resolve(f"FILE://localhost{root}/a%20b.png", "image", policy) == root / "a b.png"
    messages = set()
    for url in (
        f"file://{root}/missing.png",
        f"file://{outside}/secret.png",
        f"file://{root}/../outside/secret.png",
        f"file://{root}/%2e%2e/outside/secret.png",
        f"file://{root}/link.png",
        f"file://{root}",
        f"file://otherhost{root}/a%20b.png",
        f"file://{root}/%00",
    ):
        with pytest.raises(MediaError) as info:
            resolve(url, "image", policy)
        messages.add((str(info.value), info.value.code))
    assert len(messages) == 1
    assert code("file:///x.png", FetchPolicy(schemes=frozenset({"file"}))) == "url_forbidden"


# ---------------------------------------------------------------------- http(s):


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        self.server.seen.append((self.path, dict(self.headers)))
        action = self.server.routes.get(self.path)
        if action is None:
            self.send_error(404)
        elif isinstance(action, bytes):
            self.reply(200, action)
        else:
            action(self)

    def reply(self, status, body=b"", **headers):
        self.send_response(status)
        headers.setdefault("Content_Length", str(len(body)))
        for name, value in headers.items():
            if value is not None:
                self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        with contextlib.suppress(OSError):
            self.wfile.write(body)
        self.close_connection = True


@pytest.fixture
def server():
    httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    httpd.daemon_threads = True
    httpd.routes, httpd.seen = {}, []
    httpd.url = f"http://127.0.0.1:{httpd.server_port}"
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield httpd
    httpd.shutdown()
    httpd.server_close()
    thread.join()


OPEN = FetchPolicy(allow_private_networks=True, total_seconds=30.0, max_bytes=100_000)


def redirect(location, status=302):
    return lambda handler: handler.reply(status, Location=location)


def test_fetches_with_a_user_agent(server):
    server.routes["/a.png?x=1"] = PNG
    assert resolve(server.url + "/a.png?x=1#part", "image", OPEN) == PNG
    path, headers = server.seen[0]
    assert path == "/a.png?x=1"
    assert headers["User-Agent"].startswith("k3vl")
    assert headers["Accept-Encoding"] == "identity"
    assert headers["Host"] == server.url.removeprefix("http://")


def test_names_outside_ascii_are_escaped(server):
    server.routes["/b%C3%A4r.png"] = PNG
    assert resolve(server.url + "/bär.png", "image", OPEN) == PNG


def test_loopback_is_denied_by_default_and_never_reached(server):  # R29
    assert code(server.url + "/a.png") == "url_forbidden"
    assert code(f"http://localhost:{server.server_port}/a.png") == "url_forbidden"
    assert server.seen == []


def test_empty_answer_is_called_empty(server):  # R14, I33
    server.routes["/a.jpg"] = b""
    assert code(server.url + "/a.jpg", OPEN) == "image_empty"


def test_error_page_is_not_a_picture(server):  # I34
    server.routes["/a.jpg"] = b"<html><body>Sorry</body></html>"
    with pytest.raises(MediaError, match="HTML"):
        MediaProcessor(K3_MEDIA, policy=OPEN).process(server.url + "/a.jpg")


def test_status_and_connection_failures(server):
    assert code(server.url + "/missing", OPEN) == "image_fetch_failed"
    assert code(server.url + "/missing", OPEN, kind="video") == "video_fetch_failed"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.raises(MediaError, match="connection refused"):
        resolve(f"http://127.0.0.1:{port}/", "image", OPEN)
    with pytest.raises(MediaError, match="cannot be resolved"):
        resolve("http://no-such-host.invalid/", "image", OPEN)


def test_up_to_three_redirects(server):
    for i in range(4):
        server.routes[f"/{i}"] = redirect(f"/{i + 1}", (301, 302, 303, 307)[i])
    server.routes["/4"] = PNG
    assert resolve(server.url + "/1", "image", OPEN) == PNG
    with pytest.raises(MediaError, match="more than 3 redirects"):
        resolve(server.url + "/0", "image", OPEN)


@pytest.mark.parametrize(
    "location",
    [
        "file:///etc/passwd",
        "data:image/png;base64,AAAA",
        "ftp://example.com/a",
        "http://user:secret@example.com/",
        "http://127.0.0.1\\@example.com/",
        "http://[::1",
        "",
    ],
)
def test_redirects_elsewhere_are_refused(server, location):
    server.routes["/a"] = redirect(location)
    assert code(server.url + "/a", OPEN) in ("url_forbidden", "url_invalid", "image_fetch_failed")


def test_every_hop_is_checked(server, monkeypatch):  # R29
    """A public host that redirects to an internal one; only the look-up is faked."""
    server.routes["/"] = redirect(f"http://internal.test:{server.server_port}/secret")
    server.routes["/secret"] = PNG
    monkeypatch.setattr("k3vl.vision.source.is_public_address", lambda a: a != "127.0.0.2")
    real = socket.getaddrinfo
    names = {"public.test": "127.0.0.1", "internal.test": "127.0.0.2"}
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, *a, **k: real(names.get(host, host), *a, **k)
    )
    assert code(f"http://public.test:{server.server_port}/") == "url_forbidden"
    assert [path for path, _ in server.seen] == ["/"]


def test_a_name_is_looked_up_once_and_every_address_counts(server, monkeypatch):  # R29
    """DNS rebinding: the second answer would be internal, the connection keeps the first."""
    server.routes["/"] = PNG
    answers = iter(["127.0.0.1", "10.0.0.1"])
    real = socket.getaddrinfo

    def lookup(host, *args, **kwargs):
        return real(next(answers) if host == "rebind.test" else host, *args, **kwargs)

    monkeypatch.setattr("k3vl.vision.source.is_public_address", lambda a: a == "127.0.0.1")
    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    url = f"http://rebind.test:{server.server_port}/"
    assert resolve(url, "image", DEFAULT_POLICY) == PNG
    assert code(url) == "url_forbidden"


def test_https_does_not_fall_back_to_http(monkeypatch):
    monkeypatch.setattr("k3vl.vision.source._hop", lambda *_: "http://example.com/a.png")
    with pytest.raises(MediaError, match="from https to http"):
        resolve("https://example.com/a.png", "image", DEFAULT_POLICY)


def test_tls_against_a_plain_server_fails_cleanly(server):
    url = server.url.replace("http:", "https:")
    with pytest.raises(MediaError, match="TLS failed"):
        resolve(url, "image", OPEN)


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1/",
        "http://127.1/",
        "http://2130706433/",
        "http://0x7f.1/",
        "http://0.0.0.0/",
        "http://[::1]/",
        "http://[::ffff:127.0.0.1]/",
        "http://[::]/",
        "http://10.1.2.3/",
        "http://172.16.0.1/",
        "http://192.168.1.1/",
        "http://100.64.0.1/",
        "http://169.254.169.254/latest/meta-data/",
        "http://224.0.0.1/",
        "http://[fe80::1]/",
        "http://[fd00::1]/",
        "http://[64:ff9b::7f00:1]/",
        "http://[64:ff9b:1::7f00:1]/",
        "http://[::127.0.0.1]/",
        "http://[::ffff:0:127.0.0.1]/",
        "http://[fec0::1]/",
    ],
)
def test_internal_addresses_are_denied(url):  # R29
    assert code(url) == "url_forbidden"


@pytest.mark.parametrize(
    "url",
    [
        "http://example.com\\@127.0.0.1/",
        "http://127.0.0.1\\.example.com/",
        "http://a b/",
        "http://exa\tmple.com/",
        "http:///path",
        "http://",
        "http://host:99999/",
        "http://user@example.com/",
        "http://[::1%25eth0]/",
    ],
)
def test_ambiguous_urls_are_denied(url):  # R29
    assert code(url) == "url_invalid"


def test_public_addresses():
    assert all(map(is_public_address, ["8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8"]))
    for inner in ("2002:7f00:1::", "::ffff:10.0.0.1", "64:ff9b::a00:1"):
        assert not is_public_address(inner)


@pytest.mark.parametrize("name", ["two\nlines.png", "bytes\udcff.png", "esc\x1b[31m.png"])
def test_messages_with_odd_names_are_one_printable_line(tmp_path, name):
    for path in (tmp_path / name, tmp_path / "directory" / name):
        with pytest.raises(MediaError) as info:
            resolve(path, "image", DEFAULT_POLICY)
        assert str(info.value).isprintable()


def test_directories_are_named_as_such():
    for path in (Path("/"), Path(".")):
        with pytest.raises(MediaError, match=r"^[/.]: is a directory"):
            resolve(path, "image", DEFAULT_POLICY)


def test_announced_size_over_the_cap_is_refused_unread(server):
    server.routes["/"] = lambda h: h.reply(200, b"x", Content_Length="999999999")
    assert code(server.url + "/", OPEN) == "media_too_large"


def test_unannounced_size_over_the_cap_is_cut(server):
    server.routes["/"] = lambda h: h.reply(200, b"x" * 300_000, Content_Length=None)
    assert code(server.url + "/", OPEN) == "media_too_large"


def test_short_answer_is_a_failure_and_not_a_picture(server):
    server.routes["/"] = lambda h: h.reply(200, PNG[:20], Content_Length=str(len(PNG)))
    with pytest.raises(MediaError, match=f"after 20 of {len(PNG)} bytes"):
        resolve(server.url + "/", "image", OPEN)


def test_compressed_answer_is_refused(server):
    server.routes["/"] = lambda h: h.reply(200, PNG, Content_Encoding="gzip")
    assert code(server.url + "/", OPEN) == "image_fetch_failed"


def test_dripping_server_hits_the_total_time(server):
    def drip(handler):
        handler.reply(200, b"x", Content_Length=None)
        handler.close_connection = False
        with contextlib.suppress(OSError):
            for _ in range(1200):
                time.sleep(0.05)
                handler.wfile.write(b"x")
        handler.close_connection = True

    server.routes["/"] = drip
    policy = FetchPolicy(allow_private_networks=True, total_seconds=0.3)
    start = time.perf_counter()
    with pytest.raises(MediaError, match="timed out"):
        resolve(server.url + "/", "image", policy)
    assert time.perf_counter() - start < 30, "it would go on for a minute"


def test_silent_server_hits_the_read_time(server):
    server.routes["/"] = lambda _: time.sleep(5.0)
    policy = FetchPolicy(allow_private_networks=True, read_seconds=0.2)
    with pytest.raises(MediaError, match="timed out"):
        resolve(server.url + "/", "image", policy)


def test_garbage_instead_of_http(server):
    server.routes["/"] = lambda h: h.wfile.write(b"\x00\x01 not http\r\n\r\n")
    with pytest.raises(MediaError, match="not a valid HTTP answer"):
        resolve(server.url + "/", "image", OPEN)
