"""The page as served, without a browser: what it refuses, what it reads, what it shows."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from PIL import Image

pytest.importorskip("gradio")

import gradio as gr
import httpx
from click.testing import CliRunner

from k3vl.app.chat_demo import launch, look, page
from k3vl.app.chat_demo.examples import chat_examples, example_folder
from k3vl.app.chat_demo.guard import MAX_CALL_BYTES, names_url
from k3vl.app.chat_demo.launch import DemoSettings, is_loopback, parse_auth, warm_up
from k3vl.app.chat_demo.page import read_settings
from k3vl.app.chat_demo.seen import MAX_FRAMES_SHOWN, see, with_grid
from k3vl.app.cli import cli
from k3vl.config import checkpoint_path, load_media_config
from k3vl.errors import ConfigError
from k3vl.types import MediaPart
from k3vl.vision.processor import MediaProcessor, model_view
from tests.app.chat_fakes import DIRECTORY, END, scripted
from tests.app.chat_server import serve

if TYPE_CHECKING:
    from collections.abc import Iterator

PROCESSOR = MediaProcessor(load_media_config(DIRECTORY))
DRAWER = (False, "", 0.0, 1.0, 64, "", "")


@pytest.fixture(scope="module")
def site() -> Iterator[httpx.Client]:
    with (
        serve("A cat." + END, max_file_mb=1) as served,
        httpx.Client(base_url=served.url, timeout=30) as client,
    ):
        yield client


def call(site: httpx.Client, files: list[dict], text: str | None = "What?") -> httpx.Response:
    """Send a question as the page does, and wait for what comes of it."""
    config = site.get("/config").json()
    box = next(c["id"] for c in config["components"] if c["type"] == "multimodaltextbox")
    index = next(
        d["id"]
        for d in config["dependencies"]
        if [box, "submit"] in [list(t) for t in d["targets"]]
    )
    body = {
        "data": [None if text is None else {"text": text, "files": files}, *DRAWER],
        "fn_index": index,
        "session_hash": "tab",
    }
    answer = site.post("/gradio_api/queue/join", json=body)
    if answer.status_code != 200:
        return answer
    return site.get("/gradio_api/queue/data", params={"session_hash": "tab"})


def test_a_question_is_answered(site: httpx.Client, tmp_path: Path) -> None:
    Image.new("RGB", (56, 28), "red").save(tmp_path / "red.png")
    with (tmp_path / "red.png").open("rb") as stream:
        [path] = site.post("/gradio_api/upload", files={"files": stream}).json()
    stream = call(site, [{"path": path, "meta": {"_type": "gradio.FileData"}}])
    assert "A cat." in stream.text


@pytest.mark.parametrize("path", ["/etc/hostname", str(Path(__file__).resolve())])
def test_files_of_the_machine_are_not_read(site: httpx.Client, path: str) -> None:
    stream = call(site, [{"path": path, "meta": {"_type": "gradio.FileData"}}])
    assert '"success": false' in stream.text or '"success":false' in stream.text
    assert "A cat." not in stream.text
    assert site.get(f"/gradio_api/file={path}").status_code in (403, 404)


def test_a_box_that_was_never_touched_sends_nothing(site: httpx.Client) -> None:
    stream = call(site, [], text=None)
    assert '"success": true' in stream.text or '"success":true' in stream.text
    assert "A cat." not in stream.text


def test_every_answer_forbids_what_is_elsewhere(site: httpx.Client) -> None:
    for answer in (site.get("/"), site.post("/gradio_api/queue/join", content=b"{")):
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'self' data: blob:")


def test_urls_are_refused_before_anything_is_fetched(site: httpx.Client) -> None:
    answer = call(
        site, [{"path": "http://127.0.0.1:9/x.png", "meta": {"_type": "gradio.FileData"}}]
    )
    assert (answer.status_code, answer.json()) == (400, {"detail": "only uploaded files are taken"})
    escaped = '{"data": [{"p\\u0061th": "http:\\/\\/a\\/b"}]}'
    answer = site.post("/gradio_api/queue/join", content=escaped)
    assert answer.status_code == 400, "whatever its content type is"


def test_calls_are_bounded_and_must_be_json(site: httpx.Client) -> None:
    assert site.post("/gradio_api/queue/join", content=b"{").status_code == 400
    long = json.dumps("x" * MAX_CALL_BYTES)
    assert site.post("/gradio_api/queue/join", content=long).status_code == 413
    deep = "[" * 100_000 + "]" * 100_000
    assert site.post("/gradio_api/queue/join", content=deep).status_code == 400


def test_uploads_are_bounded(site: httpx.Client) -> None:
    answer = site.post("/gradio_api/upload", files={"files": ("big.png", b"x" * 2_000_000)})
    assert answer.status_code == 413


def test_there_is_no_interface_for_programs_and_no_telemetry(site: httpx.Client) -> None:
    info = site.get("/gradio_api/info").json()
    assert info["named_endpoints"] == {}
    assert info["unnamed_endpoints"] == {}
    config = site.get("/config").json()
    assert config["analytics_enabled"] is False
    assert not config.get("space_id")


def test_names_of_urls_are_found_at_any_depth() -> None:
    assert names_url({"data": [[{"files": [{"path": "https://a/b"}]}]]})
    assert names_url({"path": "file:///etc/passwd"})
    assert not names_url({"data": [{"text": "see https://a/b", "url": "http://a", "path": "/x"}]})


# ---------------------------------------------------------------------- the drawer


def test_settings_of_the_drawer() -> None:
    tools = '[{"type": "function", "function": {"name": "look_up", "parameters": {}}}]'
    settings = read_settings(True, "low", 0.7, 0.9, 1e9, " 7 ", tools)
    assert (settings.options.thinking, settings.options.thinking_effort) == (True, "low")
    assert (settings.sampling.temperature, settings.sampling.top_p) == (0.7, 0.9)
    assert (settings.sampling.seed, settings.sampling.max_tokens) == (7, 8192)
    assert len(settings.tools) == 1
    plain = read_settings(*DRAWER)
    assert (plain.sampling.seed, plain.options.thinking_effort, plain.tools) == (None, None, ())
    assert read_settings(True, "made up", *DRAWER[2:]).options.thinking_effort is None


@pytest.mark.parametrize(
    ("seed", "tools", "message"),
    [
        ("x", "", "whole number"),
        ("", "[", "not JSON"),
        ("", "{}", "JSON list"),
        ("", "[1]", "cannot be used"),
    ],
)
def test_fields_that_cannot_be_read_are_said(seed: str, tools: str, message: str) -> None:
    with pytest.raises(gr.Error, match=message):
        read_settings(False, "", 0.0, 1.0, 64, seed, tools)


@pytest.mark.parametrize("text", ["", "name", "name:", ":password"])
def test_auth_that_is_half_given(text: str) -> None:
    with pytest.raises(ConfigError, match="NAME:PASSWORD"):
        parse_auth(text)


def test_auth_and_hosts() -> None:
    assert parse_auth(None) is None
    assert parse_auth("me:a:b") == ("me", "a:b")
    assert [is_loopback(h) for h in ("127.0.0.1", "::1", "localhost")] == [True] * 3
    assert not any(map(is_loopback, ("0.0.0.0", "192.168.1.2", "example.org")))


def test_warming_up_asks_for_next_to_nothing() -> None:
    pipeline = scripted("A cat." + END)
    warm_up(pipeline)
    assert pipeline.backend.sampling[0].max_tokens == 2


# ---------------------------------------------------------------------- what the model sees


def test_the_grid_lies_on_patch_borders_and_leaves_the_pixels_between() -> None:
    red = Image.new("RGB", (56, 28), (200, 0, 0))
    shown = with_grid(red, 14)
    assert shown.size == (112, 56), "small pictures are enlarged"
    assert shown.getpixel((10, 10)) == (200, 0, 0)
    patch, token = shown.getpixel((28, 10)), shown.getpixel((56, 10))
    assert patch != (200, 0, 0)
    assert token not in ((200, 0, 0), patch), "borders of tokens stand out"


def test_a_transparent_picture_is_shown_over_the_chessboard() -> None:
    processor = MediaProcessor(load_media_config(checkpoint_path("demo")))
    media = processor.process(MediaPart("image", Image.new("RGBA", (56, 56), (0, 0, 0, 0))))
    [(shown, caption)] = see("glass.png", media, patch=14).pictures
    assert caption == "glass.png"
    [view] = model_view(media)
    assert shown.getpixel((9, 9)) == view.getpixel((4, 4)), "enlarged twice, the same pixels"
    assert len({view.getpixel((x, 4)) for x in range(56)}) == 2


def test_facts_are_the_processors() -> None:
    media = PROCESSOR.process(MediaPart("image", Image.new("RGB", (100, 57))))
    facts = see("<i>.png", media, patch=14).facts
    rows, columns = media.items[0].grid_thw[1:]
    assert "&lt;i&gt;.png" in facts
    assert "100 &times; 57 px" in facts
    assert f"{columns * 14} &times; {rows * 14} px" in facts
    assert f"<b>{media.items[0].num_tokens}</b>" in facts


def test_frames_have_their_times_and_long_clips_are_cut_short() -> None:
    frames = [Image.new("RGB", (28, 28), (n * 4, 0, 0)) for n in range(50)]
    media = PROCESSOR.process_frames(frames, [n * 0.5 for n in range(50)])
    seen = see("clip.mp4", media, patch=14)
    assert len(seen.pictures) == MAX_FRAMES_SHOWN
    assert seen.pictures[3][1] == "0:01.500  frame 4"
    assert "50 (first 48 shown)" in seen.facts
    assert "00:00:02.000" in seen.facts


# ---------------------------------------------------------------------- fixed parts


def test_examples_are_those_of_the_repository() -> None:
    examples = chat_examples(example_folder())
    assert len(examples) == 6
    assert all(Path(example["files"][0]).is_file() for example in examples)


def test_an_installed_package_has_no_examples(tmp_path: Path) -> None:
    assert chat_examples(tmp_path) == []


def test_nothing_is_loaded_from_elsewhere() -> None:
    """Style and head name no other host; system fonts only."""
    assert "//" not in look.CSS + look.HEAD
    assert "url(" not in look.CSS
    assert "google" not in str(look.theme().font).lower()
    assert "Google" not in str([type(font) for font in look.theme()._font])


def test_handlers_are_private() -> None:
    """Every event binding in the page says so; Gradio's default is a public endpoint."""
    source = ast.parse(Path(page.__file__).read_text(encoding="utf-8"))
    binds = [
        node
        for node in ast.walk(source)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "bind"
    ]
    assert binds
    for node in binds:
        assert "api_visibility='private'" in ast.unparse(node)


def test_gradio_that_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gradio", None)
    with pytest.raises(ConfigError, match=r"pip install 'k3vl\[demo\]'"):
        launch.run_demo(DemoSettings(), say=print)


def test_a_port_that_is_taken_ends_the_command_before_the_model_is_loaded(
    site: httpx.Client,
) -> None:
    port = str(site.base_url.port)
    ended = CliRunner().invoke(cli, ["demo", "--port", port])
    assert (ended.exit_code, ended.stdout) == (1, "")
    assert ended.stderr == f"Error: 127.0.0.1:{port}: Address already in use\n"


def test_the_command_passes_its_options_on(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    monkeypatch.setattr(launch, "run_demo", lambda settings, *, say: taken.append(settings))
    monkeypatch.setenv("K3VL_DEMO_AUTH", "me:secret")
    flags = ["--host", "::1", "--port", "7000", "--max-file-mb", "5", "--open", "--device", "cpu"]
    assert CliRunner().invoke(cli, ["demo", *flags]).exit_code == 0
    assert taken == [
        DemoSettings(
            host="::1",
            port=7000,
            max_file_mb=5,
            open_browser=True,
            auth=("me", "secret"),
            device="cpu",
        )
    ]
