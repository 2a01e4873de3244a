"""The demo model as captioner: JSON that fits its schema, pictures that are encoded once."""

from __future__ import annotations

import csv
import json
import tarfile
from pathlib import Path

import jsonschema_rs
import pyarrow.parquet as pq
import pytest
from PIL import Image

from k3vl.app.captioning.engines import LocalEngine
from k3vl.app.captioning.files import file_source
from k3vl.app.captioning.items import Item
from k3vl.app.captioning.media import MediaLoader
from k3vl.app.captioning.prompts import Prompts, text_prompt
from k3vl.app.captioning.rows import Origin
from k3vl.app.captioning.schema import closed
from k3vl.app.captioning.sidecars import Sidecars
from k3vl.app.captioning.worker import Worker
from k3vl.pipeline import Pipeline
from k3vl.types import SamplingParams
from tests.app.captioning_kit import picture, rows, run, use_echo
from tests.vision.files import noise

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
WORDS = ["fox", "kite", "bus", "owl", "boat", "strawberry", "other"]
SCHEMAS = {
    "things": {
        "type": "object",
        "properties": {
            "things": {"type": "array", "items": {"enum": WORDS}, "minItems": 1, "maxItems": 4},
            "count": {"type": "integer", "minimum": 0, "maximum": 9},
            "alone": {"type": "boolean"},
        },
        "required": ["things", "count", "alone"],
        "additionalProperties": False,
    },
    "text": {
        "type": "object",
        "properties": {"caption": {"type": "string", "maxLength": 60}},
        "required": ["caption"],
    },
    "nested": {
        "$defs": {"place": {"enum": ["left", "middle", "right", None]}},
        "type": "array",
        "minItems": 1,
        "maxItems": 3,
        "items": {
            "type": "object",
            "properties": {
                "at": {"$ref": "#/$defs/place"},
                "share": {"type": "integer", "minimum": 0, "maximum": 100},
            },
            "required": ["at"],
        },
    },
}


def write(path: Path, schema: object) -> Path:
    path.write_text(json.dumps(schema))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two drawings, a clip, and pictures that the demo model has never seen the like of."""
    folder = tmp_path_factory.mktemp("in")
    for name in ("shapes.png", "sailboat.mp4"):
        (folder / name).write_bytes((EXAMPLES / name).read_bytes())
    noise((90, 70), 80).save(folder / "noise.png")
    Image.new("RGB", (30, 400), "white").save(folder / "empty.png")
    return folder


@pytest.mark.parametrize(("name", "temperature"), [("things", 0), ("text", 1.5), ("nested", 1.5)])
def test_every_caption_of_the_demo_model_fits(
    name: str, temperature: float, folder: Path, tmp_path: Path
) -> None:
    schema = write(tmp_path / "schema.json", SCHEMAS[name])
    result = run(
        *(folder, "--json", "--json-schema", schema, "--max-tokens=200"),
        *(f"--temperature={temperature}", "--seed=3"),
    )
    assert result.exit_code == 0, result.stderr
    found = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(found) == len(list(folder.iterdir()))
    for row in found:
        assert row["finish"] == "stop"
        assert json.loads(row["caption"]) == row["data"]
        jsonschema_rs.validate(SCHEMAS[name], row["data"])


def test_objects_are_closed_where_that_loses_nothing() -> None:
    inner = {"properties": {"b": {"type": "string"}}}
    open_ended = {"properties": {"b": {}}, "additionalProperties": {"type": "string"}}
    combined = {"allOf": [inner, {"properties": {"c": {}}}]}
    schema = {"items": {"properties": {"a": inner, "o": open_ended, "c": combined}}}
    assert closed(schema) == {
        "items": {
            "properties": {
                "a": {**inner, "additionalProperties": False},
                "o": open_ended,
                "c": combined,
            },
            "additionalProperties": False,
        }
    }
    assert closed(True) is True


def test_an_answer_that_is_cut_short_is_an_error(folder: Path, tmp_path: Path) -> None:
    schema = write(tmp_path / "schema.json", SCHEMAS["things"])
    command = (folder / "noise.png", "--json", "--json-schema", schema, "--max-tokens=3")
    result = run(*command)
    row = json.loads(result.stdout)
    assert (result.exit_code, row["code"], row["error_class"]) == (2, "schema_unmet", "engine")
    assert "--max-tokens" in row["error"]


def test_every_output_holds_the_object(folder: Path, tmp_path: Path) -> None:
    schema = write(tmp_path / "schema.json", SCHEMAS["things"])
    outputs = [tmp_path / f"o.{ending}" for ending in ("jsonl", "csv", "parquet", "tar")]
    flags = [f"--output={path}" for path in outputs]
    command = (folder, *flags, f"--json-schema={schema}", "--sidecar=txt", "--sidecar=json")
    assert run(*command, f"--sidecar-dir={tmp_path / 'side'}").exit_code == 0
    lines = rows(outputs[0])
    objects = {row["id"]: row["data"] for row in lines}
    with outputs[1].open(newline="") as file:
        assert {r["id"]: json.loads(r["data"]) for r in csv.DictReader(file)} == objects
    table = pq.read_table(outputs[2]).to_pylist()
    assert {row["id"]: json.loads(row["data"]) for row in table} == objects
    with tarfile.open(outputs[3]) as tar:
        records = [json.loads(tar.extractfile(m).read()) for m in tar if m.name.endswith(".json")]
    assert {row["id"]: row["data"] for row in records} == objects
    for row in lines:
        base = tmp_path / "side" / Path(row["path"]).name
        assert json.loads(base.with_suffix(".txt").read_text()) == row["data"]
        assert json.loads(base.with_suffix(".json").read_text())["data"] == row["data"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not JSON"),
        ("[]", "a schema is a JSON object"),
        ('{"type": "thing"}', "not a JSON schema"),
        ('{"$ref": "#/nowhere"}', "not a JSON schema"),
        ('{"type": "object", "patternProperties": 3}', "not a JSON schema"),
        ('{"not": {"type": "string"}}', "the schema cannot be enforced"),
    ],
)
def test_schemas_that_cannot_be_used_are_found_first(
    content: str, message: str, tmp_path: Path
) -> None:
    picture(tmp_path / "a.png")
    (tmp_path / "schema.json").write_text(content)
    result = run(tmp_path / "a.png", "--json-schema", tmp_path / "schema.json")
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (1, "", 1)
    assert message in result.stderr


def test_nothing_is_put_around_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_echo(monkeypatch)
    picture(tmp_path / "a.png")
    schema = write(tmp_path / "schema.json", SCHEMAS["text"])
    result = run(tmp_path / "a.png", "--json-schema", schema, "--trigger=sks")
    assert result.exit_code == 1
    assert "would not be JSON" in result.stderr


def test_a_picture_is_encoded_once_for_all_prompts(tmp_path: Path) -> None:
    item = Item(file_source(picture(tmp_path / "a.png", size=(60, 60))))
    prompts = Prompts(
        prompts=tuple(text_prompt(f"Question {number}?") for number in range(4)),
        sampling=SamplingParams(max_tokens=4),
    )
    with Pipeline.load() as pipeline:
        worker = Worker(
            loader=MediaLoader(pipeline.processor),
            prompts=prompts,
            engine=LocalEngine(pipeline),
            sidecars=Sidecars(),
            origin=Origin(model="demo", revision=""),
            item_seconds=None,
            thumbnails=False,
        )
        outcome = worker.caption(item, prompts.prompts)
        stats = pipeline.stats()
    assert all("caption" in row for _, row in outcome.rows)
    assert (stats.feature_misses, stats.first_tokens) == (1, 4)
