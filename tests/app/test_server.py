"""The real server process, asked by the real ``openai`` client."""

from __future__ import annotations

import io
import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import httpx2
import numpy as np
import openai
import pytest
from PIL import Image

from k3vl.config import checkpoint_path
from k3vl.xtml.tokenizer import load_tokenizer
from tests.app.serving import (
    EXAMPLES,
    Process,
    ask,
    data_url,
    get,
    image_part,
    metric,
    post,
    until,
)
from tests.vision.files import noise

LABELS = [json.loads(line) for line in (EXAMPLES / "labels.jsonl").read_text().splitlines()]
CLIP = next(label for label in LABELS if label["file"].endswith(".mp4"))
PICTURE = next(label for label in LABELS if label["file"] == "fox-kite-bus.png")
SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["animal", "vehicle"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["kind", "count"],
    "additionalProperties": False,
}
LOOK = {
    "type": "function",
    "function": {"name": "look", "description": "Look closer.", "parameters": SCHEMA},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    root = tmp_path_factory.mktemp("media")
    (root / "allowed").mkdir()
    (root / "allowed" / "fox.png").write_bytes((EXAMPLES / PICTURE["file"]).read_bytes())
    (root / "secret.png").write_bytes((EXAMPLES / PICTURE["file"]).read_bytes())
    (root / "allowed" / "link.png").symlink_to(root / "secret.png")
    process = Process("--allowed-media-path", str(root / "allowed"), "--max-images", "20")
    process.root = root
    yield process
    assert process.stop() == 0
    text = "\n".join(process.lines)
    assert "Traceback" not in text
    assert "base64" not in text
    assert "What is this" not in text, "the log holds content"


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as made:
        yield made


def picture(**more) -> dict:
    return image_part((EXAMPLES / PICTURE["file"]).read_bytes(), **more)


def png(width: int, height: int, mode: str = "RGB", color=0) -> bytes:
    out = io.BytesIO()
    Image.new(mode, (width, height), color).save(out, "PNG")
    return out.getvalue()


def messages(*parts) -> list:
    return ask(*parts)["messages"]


# ---------------------------------------------------------------------- answers


def test_a_picture_is_described(client) -> None:
    reply = client.chat.completions.create(
        model="demo", messages=messages(picture(), PICTURE["prompt"])
    )
    (choice,) = reply.choices
    assert choice.message.content == PICTURE["expected"]
    assert choice.finish_reason == "stop"
    assert reply.usage.prompt_tokens_details.image_tokens == 192
    assert reply.usage.prompt_tokens_details.cached_tokens is not None
    assert reply.usage.completion_tokens_details.reasoning_tokens == 0
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    assert reply.k3vl == {"warnings": []}


def test_a_stream_says_the_same(client) -> None:
    stream = client.chat.completions.create(
        model="demo",
        messages=messages(picture(), PICTURE["prompt"]),
        stream=True,
        stream_options={"include_usage": True},
    )
    *chunks, last = stream
    assert last.choices == []
    assert last.usage.prompt_tokens_details.image_tokens == 192
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "stop"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == PICTURE["expected"]
    assert all(chunk.usage is None for chunk in chunks)


def test_without_include_usage_every_chunk_has_a_choice(client) -> None:
    stream = client.chat.completions.create(
        model="demo", messages=messages("Hello"), stream=True, max_tokens=4
    )
    assert all(len(chunk.choices) == 1 for chunk in stream)


def test_a_clip_is_described(client) -> None:
    clip = data_url((EXAMPLES / CLIP["file"]).read_bytes(), "video/mp4")
    for form in (clip, {"url": clip}):
        part = {"type": "video_url", "video_url": form}
        reply = client.chat.completions.create(
            model="demo", messages=messages(part, CLIP["prompt"])
        )
        assert reply.choices[0].message.content == CLIP["expected"]
        assert reply.usage.prompt_tokens_details.video_tokens > 0


def test_many_at_once_are_as_alone(client) -> None:
    def one(label: dict) -> str:
        path = EXAMPLES / label["file"]
        kind = "video" if path.suffix == ".mp4" else "image"
        part = {"type": f"{kind}_url", f"{kind}_url": {"url": data_url(path.read_bytes())}}
        reply = client.chat.completions.create(
            model="demo", messages=messages(part, label["prompt"])
        )
        return reply.choices[0].message.content

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(one, LABELS)) == [label["expected"] for label in LABELS]


def test_choices_and_logprobs(client) -> None:
    reply = client.chat.completions.create(
        model="demo",
        messages=messages(picture(), PICTURE["prompt"]),
        n=3,
        logprobs=True,
        top_logprobs=2,
    )
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    for choice in reply.choices:
        tokens = choice.logprobs.content
        assert "".join(token.token for token in tokens) == choice.message.content
        for token in tokens:
            assert token.logprob <= 0
            assert bytes(token.bytes).decode() == token.token
            assert token.top_logprobs[0].token == token.token, "greedy"
            assert len(token.top_logprobs) == 2


def test_seeds_repeat_and_differ(client) -> None:
    def write(seed: int) -> list[str]:
        reply = client.chat.completions.create(
            model="demo", messages=messages("Say"), temperature=2, seed=seed, n=2, max_tokens=12
        )
        return [choice.message.content for choice in reply.choices]

    first = write(3)
    assert first == write(3)
    assert first[0] != first[1]
    assert first != write(4)


def test_stop_strings_and_length(client) -> None:
    reply = client.chat.completions.create(
        model="demo", messages=messages(picture(), PICTURE["prompt"]), stop=[" kite"]
    )
    assert reply.choices[0].message.content == "A fox, a"
    assert reply.choices[0].finish_reason == "stop"
    short = client.chat.completions.create(
        model="demo", messages=messages(picture(), PICTURE["prompt"]), max_completion_tokens=2
    )
    assert short.choices[0].finish_reason == "length"
    assert short.usage.completion_tokens == 2


@pytest.mark.parametrize("effort", [None, "low"])
def test_a_schema_is_met_with_a_picture(client, effort) -> None:
    reply = client.chat.completions.create(
        model="demo",
        messages=messages(picture(), "What is this?"),
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
        **({} if effort is None else {"reasoning_effort": effort}),
        max_tokens=300,
    )
    value = json.loads(reply.choices[0].message.content)
    assert value["kind"] in ("animal", "vehicle")
    assert 0 <= value["count"] <= 9
    details = reply.usage.completion_tokens_details
    assert (details.reasoning_tokens > 0) == (effort is not None)


def test_the_tools_loop(client) -> None:
    asked = messages(picture(), "What is this?")
    choice = {"type": "function", "function": {"name": "look"}}
    reply = client.chat.completions.create(
        model="demo", messages=asked, tools=[LOOK], tool_choice=choice
    )
    message = reply.choices[0].message
    assert reply.choices[0].finish_reason == "tool_calls"
    assert message.content is None
    (call,) = message.tool_calls
    assert set(json.loads(call.function.arguments)) == {"kind", "count"}
    result = {"role": "tool", "tool_call_id": call.id, "content": [picture()]}
    again = client.chat.completions.create(
        model="demo",
        messages=[*asked, message.model_dump(exclude_none=True), result],
        tools=[LOOK],
        max_tokens=8,
    )
    assert again.usage.prompt_tokens_details.image_tokens == 2 * 192


def test_streamed_calls_put_together_are_whole(client) -> None:
    stream = client.chat.completions.create(
        model="demo",
        messages=messages("Look"),
        tools=[LOOK],
        tool_choice="required",
        parallel_tool_calls=False,
        stream=True,
    )
    pieces, names, reasons = [], [], []
    for chunk in stream:
        (choice,) = chunk.choices
        reasons.append(choice.finish_reason)
        for call in choice.delta.tool_calls or ():
            assert call.index == 0
            names += [call.function.name] if call.function.name else []
            pieces.append(call.function.arguments)
    assert names == ["look"]
    assert set(json.loads("".join(pieces))) == {"kind", "count"}
    assert len([piece for piece in pieces if piece]) > 1, "arguments come bit by bit"
    assert reasons[-1] == "tool_calls"


def test_a_partial_answer_is_continued(client) -> None:
    begun = {"role": "assistant", "content": "A fox, a", "partial": True}
    reply = client.chat.completions.create(
        model="demo", messages=[*messages(picture(), PICTURE["prompt"]), begun]
    )
    assert reply.choices[0].message.content == " kite and a bus."


# ---------------------------------------------------------------------- counts and structure


def test_tokenize_is_what_the_answer_is_made_from(client, server) -> None:
    body = ask(picture(), PICTURE["prompt"])
    plan = post(server.url, body, "/v1/tokenize").json()
    reply = client.chat.completions.create(**body)
    assert plan["prompt_tokens"] == reply.usage.prompt_tokens
    assert plan["count"] == len(plan["tokens"])
    assert plan["media"][0]["tokens"] == plan["image_tokens"] == 192
    assert plan["media"][0]["part"] == "messages[0].content[0]"


@pytest.mark.parametrize("num_images", [0, 1, 3])
def test_text_with_every_marker_is_text(server, client, num_images: int) -> None:
    tokenizer = load_tokenizer(checkpoint_path("demo"))
    names = [*tokenizer.special_ids, "<|kimi_image_placeholder|>"]
    parts = [picture() for _ in range(num_images)]
    hostile = post(server.url, ask(*parts, "".join(names)), "/v1/tokenize").json()
    plain = post(server.url, ask(*parts, "x"), "/v1/tokenize").json()
    special = set(tokenizer.special_ids.values())
    assert hostile["image_tokens"] == 192 * num_images
    assert [t for t in hostile["tokens"] if t in special] == [
        t for t in plain["tokens"] if t in special
    ]
    reply = client.chat.completions.create(
        model="demo", messages=messages(*parts, "".join(names)), max_tokens=2
    )
    assert reply.usage.prompt_tokens == hostile["prompt_tokens"]


def test_pictures_keep_their_order_whatever_they_take(server) -> None:
    sizes = [(900, 800), (30, 30), (700, 900), (1, 1), (40, 80)]
    parts = [image_part(png(*size)) for size in sizes]
    plan = post(server.url, ask(*parts), "/v1/tokenize").json()
    assert [(media["width"], media["height"]) for media in plan["media"]] == sizes
    places = [f"messages[0].content[{index}]" for index in range(len(sizes))]
    assert [media["part"] for media in plan["media"]] == places


def test_a_salt_has_a_name_space_of_its_own(client) -> None:
    def cached(**fields) -> int:
        reply = client.chat.completions.create(
            model="demo", messages=messages("Salted " * 60), max_tokens=1, extra_body=fields
        )
        return reply.usage.prompt_tokens_details.cached_tokens

    assert cached(cache_salt="a") == 0
    assert cached(cache_salt="a") > 0
    assert cached(cache_salt="b") == 0
    assert cached() == 0


def test_detail_lowers_the_budget_and_is_checked(server) -> None:
    part = image_part(png(900, 900), detail="low")
    assert post(server.url, ask(part), "/v1/tokenize").json()["image_tokens"] <= 256 + 64
    reply = post(server.url, ask(image_part(png(9, 9), detail="medium")))
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "messages[0].content[0].image_url.detail"


def test_a_serialised_list_is_text_with_a_warning(client) -> None:
    content = json.dumps([{"type": "text", "text": "hi"}])
    reply = client.chat.completions.create(
        model="demo", messages=[{"role": "user", "content": content}], max_tokens=1
    )
    (warning,) = reply.k3vl["warnings"]
    assert warning.startswith("messages[0].content is a string that holds a JSON list")


def test_an_animation_is_its_first_frame_with_a_warning(server) -> None:
    out = io.BytesIO()
    frames = [Image.new("RGB", (40, 40), colour) for colour in ("red", "blue")]
    frames[0].save(out, "GIF", save_all=True, append_images=frames[1:])
    lines = post(server.url, ask(image_part(out.getvalue()), max_tokens=1, stream=True)).text
    first = json.loads(lines.split("\n")[0].removeprefix("data: "))
    assert len(first["k3vl"]["warnings"]) == 1


# ---------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("change", "kind", "param"),
    [
        ({"model": "other"}, openai.NotFoundError, "model"),
        ({"temperature": 9}, openai.BadRequestError, "temperature"),
        ({"extra_body": {"nonsense": 1}}, openai.BadRequestError, "nonsense"),
        ({"messages": []}, openai.BadRequestError, "messages"),
        ({"n": 100}, openai.BadRequestError, "n"),
        ({"reasoning_effort": "medium"}, openai.BadRequestError, "reasoning_effort"),
        ({"frequency_penalty": 1.0}, openai.BadRequestError, "frequency_penalty"),
        ({"tool_choice": "required"}, openai.BadRequestError, "tool_choice"),
    ],
)
def test_errors_reach_the_client_as_their_classes(client, change, kind, param) -> None:
    with pytest.raises(kind) as caught:
        client.chat.completions.create(**{"model": "demo", "messages": messages("x"), **change})
    assert caught.value.body["param"] == param
    assert set(caught.value.body) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nowhere", 404, "unknown_url"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("DELETE", "/health", 405, "method_not_allowed"),
        ("GET", "/v1/models/other", 404, "model_not_found"),
    ],
)
def test_every_error_has_the_same_shape(server, method, path, status, code) -> None:
    reply = httpx2.request(method, server.url + path, timeout=60)
    assert reply.status_code == status
    assert reply.json()["error"]["code"] == code
    assert set(reply.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("body", "content_type", "status"),
    [
        (b"{", "application/json", 400),
        (b"[]", "application/json", 400),
        (b"\xff\xfe", "application/json", 400),
        (b'{"model": NaN}', "application/json", 400),
        (b"[" * 100_000, "application/json", 400),
        (b"{}", "text/plain", 415),
    ],
)
def test_bodies_that_are_no_request(server, body, content_type, status) -> None:
    reply = httpx2.post(
        server.url + "/v1/chat/completions",
        content=body,
        headers={"content-type": content_type},
        timeout=60,
    )
    assert reply.status_code == status
    assert reply.json()["error"]["type"] == "invalid_request_error"


def test_a_long_prompt_is_refused_by_its_length(server) -> None:
    reply = post(server.url, ask("word " * 5000))
    assert reply.status_code == 400
    assert reply.json()["error"]["code"] == "context_length_exceeded"
    stream = post(server.url, ask("word " * 5000, stream=True))
    assert stream.status_code in (200, 400)
    assert "context" in stream.text


def test_pictures_that_cannot_fit_together_are_refused_soon(server) -> None:
    """R26: each alone fits; nothing of them is encoded."""
    parts = [image_part(png(448, 448, color=(9 * number, 99, 9))) for number in range(16)]
    begun = time.monotonic()
    reply = post(server.url, ask(*parts, max_tokens=1))
    assert reply.status_code == 400
    assert reply.json()["error"]["code"] == "context_length_exceeded"
    assert time.monotonic() - begun < 30, "below 5 where nothing else runs"
    assert metric(server.url, "k3vl_encoder_cache_pins ") == 0


def test_other_host_names_do_not_reach_a_keyless_local_server(server) -> None:
    reply = get(server.url + "/v1/models", headers={"host": "evil.example:80"})
    assert reply.status_code == 403


# ---------------------------------------------------------------------- media from the wild


def faults() -> list:
    jpeg = io.BytesIO()
    noise((300, 300), 50).save(jpeg, "JPEG")
    cut = jpeg.getvalue()[: len(jpeg.getvalue()) * 6 // 10]
    bomb = bytearray(png(8, 8))
    bomb[16:24] = (40_000).to_bytes(4, "big") * 2  # the header's size, checksum left wrong
    return [
        pytest.param(cut, "image_truncated", id="R13 cut JPEG"),
        pytest.param(b"", "image_empty", id="R14 empty"),
        pytest.param(bytes(bomb), None, id="R18 declared 40000x40000"),
        pytest.param(bytes(range(7, 250)), None, id="R22 random bytes"),
        pytest.param(b"<!DOCTYPE html><p>sorry", "not_an_image", id="I34 HTML"),
        pytest.param(b"<svg xmlns='http://www.w3.org/2000/svg'/>", "svg_unsupported", id="I35"),
        pytest.param(b"%PDF-1.7\n", "pdf_unsupported", id="I40"),
    ]


@pytest.mark.parametrize(("data", "code"), faults())
def test_bad_pictures_hurt_one_request_only(server, data, code) -> None:
    reply = post(server.url, ask("x", image_part(data)))
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["param"] == "messages[0].content[1]"
    assert code is None or error["code"] == code
    assert "0x" not in error["message"]
    assert " object at " not in error["message"]
    assert post(server.url, ask(picture(), max_tokens=1)).status_code == 200


def oddities() -> list:
    def saved(image: Image.Image, kind: str, **more) -> bytes:
        out = io.BytesIO()
        image.save(out, kind, **more)
        return out.getvalue()

    pages = [Image.new("L", (30, 30), level) for level in (0, 100, 200)]
    deep = Image.fromarray(np.linspace(0, 65535, 64 * 64, dtype=np.uint16).reshape(64, 64))
    upright = Image.Exif()
    upright[0x0112] = 6
    return [
        pytest.param(png(40, 40, "RGBA"), (40, 40), 0, id="R4 all transparent"),
        pytest.param(saved(deep, "PNG"), (64, 64), 0, id="R10 16 bit"),
        pytest.param(saved(Image.new("CMYK", (40, 30)), "JPEG"), (40, 30), 0, id="R12 CMYK"),
        pytest.param(
            saved(pages[0], "TIFF", save_all=True, append_images=pages[1:]),
            (30, 30),
            1,
            id="R17 three pages",
        ),
        pytest.param(
            saved(Image.new("RGB", (640, 480)), "JPEG", exif=upright), (480, 640), 0, id="R1"
        ),
        pytest.param(png(1, 1), (1, 1), 1, id="I45 one pixel"),
        pytest.param(png(27, 257), (27, 257), 0, id="I46"),
        pytest.param(png(10_000, 1), (10_000, 1), 1, id="I44"),
        pytest.param(png(448, 449), (448, 449), 0, id="I50"),
        pytest.param(saved(Image.new("RGB", (9, 9)), "WEBP"), (9, 9), 1, id="I23 WebP"),
        pytest.param(saved(Image.new("RGB", (20, 20)), "PPM"), (20, 20), 0, id="I39 PPM"),
    ]


@pytest.mark.parametrize(("data", "size", "num_warnings"), oddities())
def test_odd_pictures_work(server, data, size, num_warnings) -> None:
    plan = post(server.url, ask(image_part(data, detail="auto"), "x"), "/v1/tokenize").json()
    (media,) = plan["media"]
    assert (media["width"], media["height"]) == size
    assert media["tokens"] >= 1
    assert len(plan["k3vl"]["warnings"]) == num_warnings


def test_equal_indices_with_other_palettes_are_other_pictures(server) -> None:
    answers = []
    for palette in ([255, 0, 0], [0, 0, 255]):
        image = Image.new("P", (112, 112))
        image.putpalette(palette)
        out = io.BytesIO()
        image.save(out, "PNG")
        body = ask(image_part(out.getvalue()), "What do you see?", logprobs=True)
        content = post(server.url, body).json()["choices"][0]["logprobs"]["content"]
        answers.append([token["logprob"] for token in content])
    assert answers[0] != answers[1]
    assert answers[0]


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:{port}/secret",
        "http://[::ffff:127.0.0.1]:{port}/secret",
        "http://localhost:{port}/secret",
        "http://169.254.169.254/latest",
        "http://example.com\\@127.0.0.1:{port}/",
        "file:///etc/passwd",
        "ftp://127.0.0.1/x",
        "/etc/passwd",
        "data:image/png,notbase64",
    ],
)
def test_nothing_inside_is_fetched(server, url: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as inside:
        inside.settimeout(0.05)
        port = inside.getsockname()[1]
        reply = post(server.url, ask(image_part(url.format(port=port))))
        assert reply.status_code == 400
        assert "127.0.0.1" not in reply.text
        with pytest.raises(TimeoutError):
            inside.accept()


def test_files_only_below_the_root(server) -> None:
    allowed = server.root / "allowed"
    ok = post(server.url, ask(image_part(f"file://{allowed}/fox.png"), max_tokens=1))
    assert ok.status_code == 200
    refusals = {
        post(server.url, ask(image_part(f"file://{path}"))).json()["error"]["message"]
        for path in (
            allowed / "link.png",
            allowed / "missing.png",
            f"{allowed}/../secret.png",
            server.root / "secret.png",
        )
    }
    assert len(refusals) == 1, "missing and forbidden look the same"


@pytest.mark.parametrize(
    "url",
    [
        data_url(png(8, 8)).rstrip("="),
        data_url(png(8, 8)).replace("image/png", "image/.png"),
        data_url(png(8, 8)).replace("image/png", "image/jpeg"),
        data_url(png(8, 8)).replace(";base64", ";charset=utf-8;BASE64"),
        data_url(png(8, 8)).replace("+", "-").replace("/", "_").replace("image_", "image/"),
        data_url(png(8, 8))[:60] + "\n " + data_url(png(8, 8))[60:],
    ],
    ids=["R21 no padding", "odd type", "wrong type", "parameters", "url-safe", "blanks"],
)
def test_data_urls_as_clients_send_them(server, url: str) -> None:
    assert post(server.url, ask(image_part(url), max_tokens=1)).status_code == 200


def test_too_many_pictures_are_counted_not_decoded(server) -> None:
    reply = post(server.url, ask(*[image_part("data:,x") for _ in range(21)]))
    assert reply.status_code == 400
    assert reply.json()["error"]["code"] == "too_many_images"
    assert "21 images" in reply.json()["error"]["message"]


def test_a_frame_list_is_refused(server) -> None:
    frames = "data:video/jpeg;base64," + ",".join(["/9j/4AAQ"] * 5000)
    reply = post(server.url, ask({"type": "video_url", "video_url": frames}))
    assert reply.status_code == 400
    assert reply.json()["error"]["code"] == "frame_list_unsupported"


def test_an_upright_size_is_in_the_plan(server) -> None:
    part = image_part((EXAMPLES / "guitar-sideways.jpg").read_bytes())
    plan = post(server.url, ask(part), "/v1/tokenize").json()["media"][0]
    assert plan["height"] > plan["width"]


# ---------------------------------------------------------------------- looking


def test_models_say_what_they_take(client) -> None:
    (model,) = client.models.list()
    assert model.id == "demo"
    assert model.context_length == 4096
    assert "video" in model.modalities["input"]
    assert model.limits["max_images"] == 20
    assert client.models.retrieve("demo").id == "demo"


def test_health_ready_and_metrics(server) -> None:
    assert get(server.url + "/health").json() == {"status": "ok"}
    assert get(server.url + "/ready").json() == {"status": "ready"}
    page = get(server.url + "/metrics").text
    for name in (
        "k3vl_requests_running",
        "k3vl_requests_waiting",
        "k3vl_media_jobs",
        "k3vl_encoder_cache_pins",
        'k3vl_cache_bytes{kind="features"}',
        "k3vl_event_loop_lag_seconds_bucket",
        "k3vl_engine_running_mean",
        "k3vl_prefix_lookups_total{kind=",
        'k3vl_prefix_tokens_total{kind="hit"}',
        'k3vl_encoder_lookups_total{kind="miss"}',
        "# TYPE k3vl_cache_evictions_total counter",
        'k3vl_stage_seconds_total{kind="prefill"}',
        'k3vl_wait_seconds_total{kind="queue"}',
        "k3vl_engine_preemptions_total",
        "k3vl_engine_lost_tokens_total",
        "k3vl_engine_held_back_total",
    ):
        assert name in page
    until(lambda: metric(server.url, "k3vl_requests_running ") == 0)
    assert metric(server.url, "k3vl_requests_waiting ") == 0
    assert metric(server.url, "k3vl_media_jobs ") == 0
