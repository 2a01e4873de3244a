"""Everything that can be captioned: folders, lists, tables, shards, URLs, pages, clips."""

from __future__ import annotations

import csv
import http.server
import io
import json
import tarfile
import threading
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from tests.app.captioning_kit import EchoBackend, film, picture, pictures, run, use_echo


@pytest.fixture(autouse=True)
def echo(monkeypatch) -> EchoBackend:
    return use_echo(monkeypatch)


def found(result) -> list[dict]:
    return [json.loads(line) for line in result.stdout.splitlines()]


def names(result) -> list[str]:
    return [Path(row["path"]).name for row in found(result)]


# ------------------------------------------------------------------ folders and lists


def test_globs_and_links(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    for name in ("a.png", "b.jpg", "sub/c.png", "skip/d.png", "e.dat"):
        picture(folder / name, 1) if name != "e.dat" else (folder / name).write_bytes(
            (folder / "a.png").read_bytes()
        )
    (folder / "link.png").symlink_to(folder / "a.png")
    (folder / "loop").symlink_to(folder)
    assert names(run(folder, "--json")) == ["a.png", "b.jpg", "d.png", "c.png"]
    assert names(run(folder, "--json", "--exclude=skip")) == ["a.png", "b.jpg", "c.png"]
    assert names(run(folder, "--json", "--include=*.png", "--exclude=skip/*")) == ["a.png", "c.png"]
    assert names(run(folder, "--json", "--include=sub/*")) == ["c.png"]
    assert names(run(folder, "--json", "--include=*.dat")) == ["e.dat"]
    followed = names(run(folder, "--json", "--follow-symlinks", "--exclude=skip"))
    assert followed == ["a.png", "b.jpg", "link.png", "c.png"]


def test_a_list_on_standard_input(tmp_path: Path) -> None:
    paths = pictures(tmp_path / "in", 3)
    text = f"{paths[2]}\n\n{paths[0]}\r\n{tmp_path / 'absent.png'}\n"
    result = run("-", "--json", stdin=text)
    assert names(result) == ["00002.png", "00000.png", "absent.png"]
    assert result.exit_code == 2
    assert "no pictures or clips there: -" in run("-", stdin="").stderr


def test_an_empty_name_is_not_this_folder(tmp_path: Path, monkeypatch) -> None:
    picture(tmp_path / "a.png")
    monkeypatch.chdir(tmp_path)
    result = run("")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "an empty path" in result.stderr


# ------------------------------------------------------------------ tables


def test_json_lines(tmp_path: Path) -> None:
    picture(tmp_path / "pics" / "a.png", 1)
    table = tmp_path / "t.jsonl"
    lines = [
        '{"id": "one", "path": "pics/a.png", "tags": "red, flat"}',
        "not json",
        '{"id": "three", "note": "nothing"}',
        '{"id": "one", "path": "pics/a.png"}',
    ]
    table.write_text("\n".join(lines))
    result = run(table, "--json", "--prompt=Tags: {tags}. Name: {stem}.")
    first, second, third, fourth = found(result)
    assert (first["id"], first["prompt"]) == ("one", "Tags: red, flat. Name: a.")
    assert (second["id"], second["code"]) == (f"{table}:2", "row_invalid")
    assert (third["id"], third["code"]) == ("three", "row_invalid")
    assert (fourth["id"], fourth["code"]) == ("one#again", "duplicate_id")


def test_csv_with_a_column_map(tmp_path: Path) -> None:
    paths = pictures(tmp_path / "in", 2)
    table = tmp_path / "t.csv"
    with table.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["key2", "where", "old"])
        writer.writerows([[f"k{n}", path, f"old\n{n}"] for n, path in enumerate(paths)])
    flags = ("--column=id=key2", "--column=path=where", "--column=caption=old")
    result = run(table, "--json", *flags, "--prompt={caption}!")
    assert [(row["id"], row["prompt"]) for row in found(result)] == [
        ("k0", "old\n0!"),
        ("k1", "old\n1!"),
    ]
    assert "expected FIELD=COLUMN" in run(table, "--column=x").stderr


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_csv_as_spreadsheets_write_it(delimiter: str, encoding: str, tmp_path: Path) -> None:
    picture(tmp_path / "a.png")
    lines = (["path", "tags"], ["a.png", '"r\u00f6t" ; a, b | c\td'], ["a.png", ""])
    with (tmp_path / "t.csv").open("w", newline="", encoding=encoding) as file:
        csv.writer(file, delimiter=delimiter).writerows(lines)
    result = run(tmp_path / "t.csv", "--json", "--prompt=Tags: {tags}.")
    assert found(result)[0]["prompt"] == f"Tags: {lines[1][1]}."


def test_one_column_has_no_delimiter(tmp_path: Path) -> None:
    picture(tmp_path / "a.png")
    (tmp_path / "t.csv").write_text("path\na.png\n")
    assert names(run(tmp_path / "t.csv", "--json")) == ["a.png"]


def test_a_quote_without_an_end_swallows_no_row(tmp_path: Path) -> None:
    pictures(tmp_path, 3)
    (tmp_path / "t.csv").write_text('path,x\n00000.png,1\n00001.png,"torn\n00002.png,3\n')
    first, second = found(run(tmp_path / "t.csv", "--json"))
    assert "caption" in first
    assert (second["id"], second["code"]) == (f"{tmp_path}/t.csv:2", "row_invalid")
    assert "unexpected end of data" in second["error"]


@pytest.mark.parametrize("path", ['""', '" "', '"."', '"/"', '".."', '"x.png\\u0000b"', "5", "[]"])
def test_a_row_without_a_usable_path_is_one_error(path: str, tmp_path: Path) -> None:
    picture(tmp_path / "a.png")
    table = tmp_path / "t.jsonl"
    table.write_text(f'{{"path": {path}, "id": "odd"}}\n{{"path": "a.png"}}\n')
    odd, good = found(run(table, "--json", "--sidecar=txt"))
    assert odd["error_class"] == "media"
    assert "caption" in good


def test_columns_of_lists_and_of_nothing(tmp_path: Path) -> None:
    picture(tmp_path / "a.png")
    rows = {"path": ["a.png"], "tags": [["red", "flat"]], "n": pa.array([None], pa.int64())}
    pq.write_table(pa.table({**rows, "deep": [{"x": 1}]}), tmp_path / "t.parquet")
    (row,) = found(run(tmp_path / "t.parquet", "--json", "--prompt={tags}/{n}/{caption}"))
    assert row["prompt"] == "red, flat//"
    (row,) = found(run(tmp_path / "t.parquet", "--json", "--prompt={deep}"))
    assert row["code"] == "prompt_variable_missing"


def test_a_repeated_id_says_what_to_do(tmp_path: Path) -> None:
    picture(tmp_path / "a.png")
    (tmp_path / "t.csv").write_text("path,q\na.png,1\na.png,2\n")
    (_, second) = found(run(tmp_path / "t.csv", "--json"))
    assert second["code"] == "duplicate_id"
    assert "--column id=COLUMN" in second["error"]


def test_parquet_with_paths_and_with_pictures(tmp_path: Path) -> None:
    paths = pictures(tmp_path / "in", 2)
    pq.write_table(pa.table({"file_name": ["in/00000.png", "in/none.png"]}), tmp_path / "p.parquet")
    assert [row.get("code") for row in found(run(tmp_path / "p.parquet", "--json"))] == [
        None,
        "media_not_found",
    ]
    images = [{"bytes": path.read_bytes(), "path": path.name} for path in paths]
    pq.write_table(pa.table({"image": images, "n": [1, 2]}), tmp_path / "q.parquet")
    result = run(tmp_path / "q.parquet", "--json", "--prompt=Number {n}")
    assert [row["prompt"] for row in found(result)] == ["Number 1", "Number 2"]
    assert names(result) == ["00000.png", "00001.png"]
    (tmp_path / "broken.parquet").write_bytes(b"PAR1")
    assert "not a Parquet file" in run(tmp_path / "broken.parquet").stderr


# ------------------------------------------------------------------ shards


def shard(path: Path, members: list[tuple[str, bytes]], mode: str = "w") -> None:
    with tarfile.open(path, mode) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


@pytest.mark.parametrize(("name", "mode"), [("s.tar", "w"), ("s.tar.gz", "w:gz")])
def test_one_bad_member_spoils_no_other(name: str, mode: str, tmp_path: Path) -> None:
    good = [path.read_bytes() for path in pictures(tmp_path / "in", 3)]
    members = [
        *[("a.png", good[0]), ("a.txt", b"old a"), ("a.json", b'{"place": "here"}')],
        ("b.png", good[1][:30]),
        ("sub/c.jpeg.png", good[1]),
        ("d.txt", b"no picture"),
        ("e.png", good[2]),
    ]
    shard(tmp_path / name, members, mode)
    result = run(tmp_path / name, "--json", "--prompt={id} {caption}")
    rows = {row["id"].rpartition("/")[2]: row for row in found(result)}
    assert rows["a"]["prompt"].endswith("/a old a")
    assert rows["b"]["code"] == "image_truncated"
    assert rows["d"]["code"] == "row_invalid"
    assert [key for key, row in rows.items() if "caption" in row] == ["a", "c", "e"]


def test_a_shard_that_ends_early(tmp_path: Path) -> None:
    data = picture(tmp_path / "x.png", 3, (200, 200)).read_bytes()
    path = tmp_path / "s.tar"
    shard(path, [(f"{n}.png", data) for n in range(4)])
    whole = path.read_bytes()
    path.write_bytes(whole[: 2 * (512 + -(-len(data) // 512) * 512) + 700])
    result = run(path, "--json")
    assert result.exit_code == 2
    assert [row.get("code") for row in found(result)] == [None, None, "shard_damaged"]


# ------------------------------------------------------------------ networks


class Pictures(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path != "/gone.png" else 404)
        stream = io.BytesIO()
        Image.new("RGB", (30, 20), "red").save(stream, "PNG")
        self.end_headers()
        self.wfile.write(stream.getvalue())

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def site():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Pictures) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_urls_under_the_fetch_policy(site: str, tmp_path: Path) -> None:
    urls = [f"{site}/a.png", f"{site}/gone.png"]
    refused = found(run(*urls, "--json"))
    assert [row["code"] for row in refused] == ["url_forbidden"] * 2
    table = tmp_path / "t.jsonl"
    table.write_text(json.dumps({"id": "x", "url": urls[0]}))
    rows = found(run(*urls, table, "--json", "--allow-private-networks"))
    assert [row.get("code") for row in rows] == [None, "image_fetch_failed", None]
    assert [row["id"] for row in rows] == [*urls, "x"]
    assert rows[0]["width"] == 30


def test_other_file_systems() -> None:
    stream = io.BytesIO()
    Image.new("RGB", (30, 20), "red").save(stream, "PNG")
    with fsspec.open("memory://box/a.png", "wb") as file:
        file.write(stream.getvalue())
    rows = found(run("memory://box/a.png", "memory://box/b.png", "nosuch://x/y.png", "--json"))
    codes = [row.get("code") for row in rows]
    assert codes == [None, "media_not_found", "media_not_found"]


# ------------------------------------------------------------------ pages and clips


def frames(count: int) -> list[Image.Image]:
    return [Image.new("RGB", (40, 40), (50 * n, 0, 99)) for n in range(count)]


def test_pages(tmp_path: Path, echo: EchoBackend) -> None:
    first, *rest = frames(3)
    path = tmp_path / "doc.tif"
    first.save(path, save_all=True, append_images=rest)
    (row,) = found(run(path, "--json"))
    assert row["warnings"] == ["3 pages, first used"]
    rows = found(run(path, "--json", "--pages=all", "--sidecar=txt"))
    assert [row["id"] for row in rows] == [f"{path}#page={n}" for n in (1, 2, 3)]
    assert len({row["caption"] for row in rows}) == 3
    assert sorted(p.name for p in tmp_path.glob("*.txt")) == [f"doc.p00{n}.txt" for n in (1, 2, 3)]
    assert found(run(path, "--json", "--pages=clip"))[0]["kind"] == "image", "pages are no clip"


def test_chosen_pages_and_frames(tmp_path: Path, echo: EchoBackend) -> None:
    first, *rest = frames(5)
    document, moves = tmp_path / "doc.tif", tmp_path / "moves.gif"
    first.save(document, save_all=True, append_images=rest)
    first.save(moves, save_all=True, append_images=rest, duration=500)
    picture(tmp_path / "still.png")

    def ids(pages: str) -> list[str]:
        rows = found(run(tmp_path, "--json", f"--pages={pages}"))
        return [Path(row["id"]).name for row in rows if "caption" in row]

    whole = {Path(row["id"]).name: row for row in found(run(tmp_path, "--json", "--pages=all"))}
    assert ids("2,4-") == [
        *("doc.tif#page=2", "doc.tif#page=4", "doc.tif#page=5"),
        *("moves.gif#page=2", "moves.gif#page=4", "moves.gif#page=5"),
        "still.png",
    ]
    chosen = found(run(document, "--json", "--pages=3"))
    assert chosen[0]["caption"] == whole["doc.tif#page=3"]["caption"]
    assert ids("5, 1-2")[:3] == [f"doc.tif#page={n}" for n in (1, 2, 5)]
    (missing,) = found(run(document, "--json", "--pages=7-9,6"))
    assert (missing["code"], missing["error"]) == ("page_missing", "no page 7, there are 5")
    dry = json.loads(run(document, "--json", "--dry-run", "--pages=7").stdout)
    assert (dry["captions"], dry["unreadable"]) == (1, 1)
    for wrong in ("0", "3-2", "last", "1,,2", "-2"):
        refused = run(document, f"--pages={wrong}")
        assert (refused.exit_code, refused.stderr.count("\n")) == (1, 1), wrong


def test_animations(tmp_path: Path) -> None:
    first, *rest = frames(4)
    path = tmp_path / "moves.gif"
    first.save(path, save_all=True, append_images=rest, duration=500)
    assert [row["kind"] for row in found(run(path, "--json"))] == ["image"]
    assert len(found(run(path, "--json", "--pages=all"))) == 4
    (clip,) = found(run(path, "--json", "--pages=clip"))
    assert (clip["kind"], clip["prompt"]) == ("video", "Describe the video.")
    assert clip["frames"] == len(clip["frame_times"]) > 1


def test_clips_whole_and_in_pieces(tmp_path: Path, echo: EchoBackend) -> None:
    path = film(tmp_path / "film.mp4")
    (whole,) = found(run(path, "--json"))
    assert (whole["kind"], whole["width"], whole["height"]) == ("video", 64, 48)
    assert whole["usage"]["video_tokens"] > 0
    pieces = found(run(path, "--json", "--clip-seconds=2"))
    assert [row["id"] for row in pieces] == [f"{path}#t={a},{a + 2}" for a in (0, 2, 4)]
    for number, row in enumerate(pieces):
        times = row["frame_times"]
        assert 2 * number <= times[0] <= times[-1] < 2 * number + 2
    assert len({row["caption"] for row in pieces}) == 3
    dry = json.loads(run(path, "--json", "--clip-seconds=2", "--dry-run").stdout)
    made = sum(row["usage"]["video_tokens"] for row in pieces)
    assert (dry["captions"], dry["clips"], dry["media_tokens"]) == (3, 3, made)
