import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from k3vl.demo.batches import BatchMaker
from k3vl.demo.buckets import BUCKETS
from k3vl.demo.chat import Chat
from k3vl.demo.compose import IGNORED, Composer
from k3vl.demo.feed import to_device
from k3vl.demo.pack import CHECKPOINT
from k3vl.demo.paint import Painter
from k3vl.demo.scene import SceneMaker, SceneOptions
from k3vl.demo.words import Printer, find_fonts

BY_NAME = {bucket.name: bucket for bucket in BUCKETS}


@pytest.fixture(scope="module")
def composer(atlas):
    return Composer(atlas, "cpu")


@pytest.fixture(scope="module")
def maker(atlas):
    fonts = find_fonts(atlas.folder)
    return BatchMaker(atlas, Chat(CHECKPOINT / "tokenizer.json"), 5, fonts, noise=False)


def _draw(composer, maker, atlas, name, *, noise=False, **options):
    printer = Printer(find_fonts(atlas.folder), 1)
    batch = maker.batch(BY_NAME[name], 3, **options)
    on_device = to_device(batch, printer, torch.device("cpu"))
    return batch, *composer(on_device.arrays, batch.bucket, noise=noise)


@pytest.mark.parametrize("name", ["img84", "port", "pair168", "vid112tail1", "chatclip2"])
def test_pictures_are_black_beyond_their_extent(composer, maker, atlas, name):
    batch, pictures, _ = _draw(composer, maker, atlas, name, noise=True)
    frames = list(batch.bucket.frames) * 3
    extents = batch.extent.astype(int)
    for (height, width), shown in zip(extents, pictures.split(frames), strict=True):
        assert shown[..., height:, :].abs().sum() == 0
        assert shown[..., width:].abs().sum() == 0


def test_labels_name_what_covers_a_cell(composer, maker, atlas):
    batch, _, labels = _draw(
        composer,
        maker,
        atlas,
        "img112",
        task="name",
        options=SceneOptions(items=1, shapes=False, text=False),
    )
    for i, row in enumerate(labels):
        found = set(row.tolist()) - {IGNORED, atlas.ground_label}
        assert found == {int(batch.label[i, 0])}


def test_one_label_row_for_every_group_of_a_clip(composer, maker, atlas):
    batch, pictures, labels = _draw(composer, maker, atlas, "vid112tail1")
    assert pictures.shape[0] == 3 * 9
    assert labels.shape == (3 * 3, batch.bucket.visual)


@pytest.mark.parametrize("name", ["chatclip1", "chatclip2"])
def test_a_clip_beside_a_picture_is_drawn_as_by_itself(composer, maker, atlas, name):
    batch, pictures, labels = _draw(composer, maker, atlas, name)
    bucket = batch.bucket
    assert pictures.shape[0] == 3 * 5
    assert labels.shape == (3 * 2, bucket.visual)
    arrays = batch.arrays() | {"strips": np.zeros((6, 48, 256), np.uint8)}
    frames = np.split(np.arange(15), np.cumsum(bucket.frames * 3)[:-1])
    for index in np.flatnonzero(batch.ground[:, 6] != 2):  # noise is drawn anew each time
        groups = bucket.media[index % 2]
        one = {k: v[index : index + 1] for k, v in arrays.items() if len(v) == 6}
        one["geometry"] = batch.geometry[frames[index]]
        tensors = {key: torch.from_numpy(value) for key, value in one.items()}
        alone, own = composer(tensors, replace(bucket, media=(groups,)), noise=False)
        assert torch.equal(alone, pictures[frames[index]])
        assert torch.equal(own[0], labels[index])


@pytest.mark.parametrize(
    ("name", "options"),
    [("img224", SceneOptions(text=True, items=2)), ("img112", SceneOptions(small=True))],
)
def test_painter_draws_what_the_composer_draws(composer, atlas, name, options):
    from k3vl.demo.batches import _picture_arrays

    bucket = BY_NAME[name]
    scenes = SceneMaker(atlas, 21)
    fonts = find_fonts(atlas.folder)
    printer, painter = Printer(fonts, 1), Painter(atlas, Printer(fonts, 1))
    compared = 0
    while compared < 4:
        scene = scenes.scene(options)
        if scene.ground.kind == 2:  # its noise is drawn by different generators
            continue
        arrays = _picture_arrays([scene], [(bucket.height, bucket.width)])
        texts = arrays.pop("texts")
        tensors = {key: torch.from_numpy(value) for key, value in arrays.items()}
        tensors["strips"] = torch.from_numpy(printer.strips(texts))
        picture, _ = composer(tensors, bucket, noise=False)
        own = np.asarray(painter.picture(scene, bucket.width, bucket.height))
        theirs = (picture[0].permute(1, 2, 0) * 255).numpy().round()
        # Whether a pixel's centre lies on the card's edge is a matter of rounding.
        assert (np.abs(own - theirs).max(2) > 3).sum() <= 2
        compared += 1


def test_kernel_paints_what_the_reference_paints(atlas_folder):
    pytest.importorskip("triton")
    script = Path(__file__).with_name("kernel_check.py")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, str(script), str(atlas_folder)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
