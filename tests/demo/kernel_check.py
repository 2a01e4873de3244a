"""Run by a test in its own process, because Triton reads TRITON_INTERPRET when it is imported."""

import sys
from pathlib import Path

import torch

from k3vl.demo.atlas import load_atlas
from k3vl.demo.batches import BatchMaker
from k3vl.demo.buckets import BUCKETS
from k3vl.demo.chat import Chat
from k3vl.demo.compose import Composer, paint, paint_reference
from k3vl.demo.feed import to_device
from k3vl.demo.pack import CHECKPOINT
from k3vl.demo.words import Printer, find_fonts

atlas = load_atlas(Path(sys.argv[1]))
fonts = find_fonts(atlas.folder)
maker = BatchMaker(atlas, Chat(CHECKPOINT / "tokenizer.json"), 3, fonts)
printer = Printer(fonts, 1)
composer = Composer(atlas, "cpu", 1)
for bucket in BUCKETS:
    if bucket.name not in ("img56", "vid112short", "port"):
        continue
    arrays = to_device(maker.batch(bucket, 2), printer, torch.device("cpu")).arrays
    layers = composer._layers(arrays, bucket.height, bucket.width, bucket.frames, 1, True)
    expected, slots = paint_reference(composer._bank.packed, layers)
    picture, own_slots = paint(composer._bank.packed, layers)
    assert (picture - expected).abs().max() < 1e-4, bucket.name
    assert (slots == own_slots).all(), bucket.name
