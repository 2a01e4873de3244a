"""The contact sheet: whole, self-contained, and safe whatever a file is called."""

from __future__ import annotations

import html.parser
import re
from typing import TYPE_CHECKING

import pytest

from k3vl.app.captioning import report
from tests.app.captioning_kit import EchoBackend, picture, pictures, run, use_echo
from tests.app.chat_fakes import CHROMIUM

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def echo(monkeypatch) -> EchoBackend:
    return use_echo(monkeypatch)


class Page(html.parser.HTMLParser):
    """What a page holds; raises where tags do not close each other."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("img", "meta"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_sheet_shows_pictures_captions_and_failures(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    pictures(folder, 3)
    picture(folder / "<script>alert(1)<.png", 7)
    (folder / "bad&.png").write_bytes(b"")
    sheet = tmp_path / "sheet.html"
    run(folder, "--report", sheet)
    text = sheet.read_text("utf-8")
    page = Page(text)
    sources = [attrs["src"] for tag, attrs in page.tags if tag == "img"]
    assert len(sources) == 4
    assert all(source.startswith("data:image/jpeg;base64,") for source in sources)
    assert "script" not in {tag for tag, _ in page.tags}
    assert "<script>alert(1)<.png" in page.text
    assert page.text.count("Picture ") == 4
    assert "bad&.png" in page.text
    assert "image_empty" in page.text
    assert not re.search(r"(?:src|href)=['\"](?!data:)", text), "nothing from outside"


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium")
@pytest.mark.xdist_group("browser")
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_a_browser_shows_the_sheet(width: int, scheme: str, tmp_path: Path) -> None:
    sync_api = pytest.importorskip("playwright.sync_api")
    pictures(tmp_path / "in", 3)
    picture(tmp_path / "in" / "tall.png", 9, size=(20, 400))
    (tmp_path / "in" / "bad.png").write_bytes(b"")
    sheet = tmp_path / "sheet.html"
    run(tmp_path / "in", "--report", sheet)
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox"], timeout=120_000
        )
        page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
        said: list[str] = []
        page.on("console", lambda message: said.append(message.text))
        page.on("request", lambda request: said.append(request.url))
        page.goto(sheet.as_uri())
        for image in page.locator("img").all():
            image.scroll_into_view_if_needed()  # pictures load when they come into sight
        page.wait_for_function(
            "[...document.images].filter(i => i.complete && i.naturalWidth > 0).length == 4"
        )
        assert page.evaluate("document.images.length") == 4
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        sync_api.expect(page.locator("body")).to_contain_text("bad.png")
        said = [line for line in said if not line.startswith(("file:", "data:"))]
        assert said == [], "no complaint, and nothing from outside"
        browser.close()


@pytest.mark.parametrize("place", ["none/sheet.html", "a.png/sheet.html", ""])
def test_a_place_where_nothing_can_be_is_found_first(place: str, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    picture(tmp_path / "a.png")
    result = run("a.png", "--report", place)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "cannot be written" in result.stderr


def test_a_long_run_is_sampled_evenly(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(report, "SHOWN", 20)
    pictures(tmp_path / "in", 200)
    sheet = tmp_path / "sheet.html"
    run(tmp_path / "in", "--report", sheet)
    page = Page(sheet.read_text("utf-8"))
    shown = [int(match) for match in re.findall(r"(\d{5})\.png", page.text)]
    assert len(shown) == 20
    assert shown == sorted(shown)
    assert min(shown) < 50
    assert max(shown) > 150
    assert "(20 of 200, evenly drawn)" in page.text
