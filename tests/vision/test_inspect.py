"""Records of ``k3vl inspect plan`` and ``k3vl inspect media``, and what importing costs."""

import json
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from k3vl.config import K3_MEDIA
from k3vl.vision.inspect import (
    describe,
    kind_of,
    load_path,
    media_record,
    plan_record,
    save_model_view,
)
from k3vl.vision.processor import MediaProcessor, model_view
from tests.vision.files import corners, encode, exif_bytes, solid_frames, video

PROCESSOR = MediaProcessor(K3_MEDIA)


def test_plan_record():
    assert plan_record({"width": 448, "height": 449}, K3_MEDIA) == {
        "new_width": 448,
        "new_height": 449,
        "pad_width": 0,
        "pad_height": 27,
        "grid_thw": [1, 34, 32],
        "num_tokens": 272,
    }


@pytest.mark.parametrize(
    "record",
    [
        {},
        None,
        [],
        "x",
        {"width": 1},
        {"width": 1.5, "height": 2},
        {"width": "1", "height": 2},
        {"width": True, "height": 2},
        {"width": 0, "height": 2},
        {"width": 5, "height": -1},
        {"width": 10**400, "height": 2},
    ],
)
def test_malformed_plan_records_are_answers_and_not_exceptions(record):
    answer = plan_record(record, K3_MEDIA)
    assert list(answer) == ["error"]
    assert answer["error"]


def test_picture_record(tmp_path):
    path = tmp_path / "a.jpg"
    path.write_bytes(encode(corners(640, 480), "JPEG", exif=exif_bytes(6)))
    record = media_record(path, PROCESSOR)
    assert json.loads(json.dumps(record)) == record
    assert record.pop("digest") == PROCESSOR.process(path).items[0].digest
    assert record == {
        "path": str(path),
        "kind": "image",
        "width": 480,
        "height": 640,
        "frames": [{"index": 0, "time": None}],
        "grid_thw": [[1, 46, 36]],
        "tokens": 414,
        "warnings": [],
    }


def test_clip_record_and_saved_frames(tmp_path):
    path = tmp_path / "clip.bin"
    path.write_bytes(video(solid_frames(6), rate=8))
    media = load_path(path, PROCESSOR)
    record = describe(path, media)
    assert record == media_record(path, PROCESSOR)
    assert record["kind"] == "video"
    assert record["frames"] == [{"index": i, "time": i / 8} for i in range(6)]
    assert record["grid_thw"] == [[4, 4, 6], [2, 4, 6]]
    assert record["tokens"] == 12
    assert len(record["digest"]) == 64
    saved = save_model_view(media, tmp_path / "new" / "dir", "clip")
    assert [p.name for p in saved] == [f"clip.{i:03d}.png" for i in range(6)]
    for path_saved, picture in zip(saved, model_view(media), strict=True):
        with Image.open(path_saved) as again:
            np.testing.assert_array_equal(np.asarray(again), np.asarray(picture))


def test_saved_picture_has_one_file(tmp_path):
    media = PROCESSOR.process(corners())
    assert save_model_view(media, tmp_path, "a") == [tmp_path / "a.png"]


def test_animated_pictures_are_pictures_unless_told_otherwise(tmp_path):
    path = tmp_path / "a.gif"
    frames = [Image.new("RGB", (56, 28), (40 * i, 0, 0)) for i in range(3)]
    path.write_bytes(encode(frames[0], "GIF", save_all=True, append_images=frames[1:]))
    assert media_record(path, PROCESSOR)["warnings"] == ["animated, 3 frames, first used"]
    assert media_record(path, PROCESSOR, "video")["kind"] == "video"


def test_errors_are_records(tmp_path):
    text, empty = tmp_path / "a.jpg", tmp_path / "b.jpg"
    text.write_text("just words")
    empty.touch()
    codes = [media_record(p, PROCESSOR)["code"] for p in (text, empty, tmp_path / "c", tmp_path)]
    assert codes == ["not_an_image", "image_empty", "media_not_found", "media_not_found"]
    record = media_record(text, PROCESSOR)
    assert list(record) == ["path", "error", "code"]
    assert "plain text" in record["error"]


def test_kind_comes_from_the_content(tmp_path):
    path = tmp_path / "a.png"
    path.write_bytes(video(solid_frames(2)))
    assert kind_of(path) == "video"
    assert kind_of(tmp_path / "missing") == "image"


@pytest.mark.parametrize("head", [b"ID3\4" + bytes(9), b"\xff\xfb\x90\x64", b"fLaC\0\0"])
def test_sound_is_a_clip_without_pictures(tmp_path, head):  # V32
    path = tmp_path / "a.mp3"
    path.write_bytes(head + bytes(2000))
    assert media_record(path, PROCESSOR)["code"] == "no_video_stream"


def test_names_that_cannot_be_looked_up_are_records(tmp_path):
    for path in (tmp_path / ("a" * 5000), tmp_path / "nul\0.png"):
        assert media_record(path, PROCESSOR)["code"] == "media_not_found"


def test_sizes_beyond_any_number_say_so():
    assert "too large" in plan_record({"width": 10**400, "height": 1}, K3_MEDIA)["error"]


def test_media_code_never_loads_torch():
    script = (
        "import sys, k3vl.vision, k3vl.vision.inspect, k3vl.vision.video;"
        "k3vl.vision.MediaProcessor, k3vl.vision.FetchPolicy, k3vl.vision.MediaLimits;"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_plans_need_no_imaging_library():
    script = (
        "import sys, k3vl.vision.plan, k3vl.vision.limits;"
        "assert not {'PIL', 'av', 'numpy', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
