"""A quick measure after training: shares of answers that are right as a whole.

Teacher forcing decides this exactly for greedy decoding: an answer is generated right if and only
if every one of its tokens is the likeliest after the right ones. Drawn on the device by the
training composer, without noise; figures to publish come from ``k3vl eval``, which runs files
through the pipeline.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from k3vl.demo.atlas import HELD, TRAIN, load_atlas
from k3vl.demo.batches import BatchMaker
from k3vl.demo.buckets import BUCKETS
from k3vl.demo.chat import Chat
from k3vl.demo.feed import DeviceBatch, Sources, to_device
from k3vl.demo.scene import SceneOptions
from k3vl.demo.words import Printer, find_fonts, word_list

if TYPE_CHECKING:
    from k3vl.demo.compose import Composer
    from k3vl.demo.train_model import DemoModel

_ONE = SceneOptions(items=1, shapes=False, text=False)
_SMALL = SceneOptions(items=1, shapes=False, text=False, small=True)
_FOUR = SceneOptions(items=4, repeat=False, shapes=False, text=False)
_TEXT = SceneOptions(items=1, text=True, digits=False)
_DIGITS = SceneOptions(items=1, text=True, digits=True)
_TWO_EVENTS = SceneOptions(items=2, frames=8, events=2)

SETS: tuple[tuple[str, str, str | None, str, SceneOptions | None], ...] = (
    ("name", "img224", "name", TRAIN, _ONE),
    ("name small", "img112", "name", TRAIN, _SMALL),
    ("name held", "img224", "name", HELD, _ONE),
    ("name openmoji", "img224", "name", "openmoji", _ONE),
    ("caption 4 openmoji", "img224", "caption", "openmoji", _FOUR),
    ("yesno openmoji", "img224", "yesno", "openmoji", None),
    ("caption 4", "img224", "caption", TRAIN, _FOUR),
    ("caption 4 thinking", "think224", "caption", TRAIN, _FOUR),
    ("caption 4 large", "img448", "caption", TRAIN, _FOUR),
    ("count", "img224", "count", TRAIN, None),
    ("total", "img224", "total", TRAIN, None),
    ("relation", "img224", "relation", TRAIN, None),
    ("at", "img224", "at", TRAIN, None),
    ("where", "img224", "where", TRAIN, None),
    ("yesno", "img224", "yesno", TRAIN, None),
    ("colour", "img224", "colour", TRAIN, None),
    ("text", "img224", "text", TRAIN, _TEXT),
    ("digits", "img224", "digits", TRAIN, _DIGITS),
    ("chart", "chart224", None, TRAIN, None),
    ("pair", "pair168", "pair", TRAIN, None),
    ("difference", "pair168", "difference", TRAIN, None),
    ("json", "img224", "json", TRAIN, None),
    ("absent", "img224", "absent", TRAIN, None),
    ("tools", "tool168", None, TRAIN, None),
    ("order", "vid112x2", "order", TRAIN, _TWO_EVENTS),
    ("when", "vid112x2", "when", TRAIN, _TWO_EVENTS),
    ("video 1 group", "vid112", "video", TRAIN, None),
    ("video 2 groups", "vid112x2", "video", TRAIN, None),
    ("video 4 groups", "vid112x4", "video", TRAIN, None),
    ("video thinking", "vidthink", "video", TRAIN, None),
)
"""Name, bucket, task (None: what training asks), style, scenes (None: the bucket's own)."""


@torch.no_grad()
def quick_check(
    model: DemoModel, composer: Composer, sources: Sources, items: int, device: torch.device
) -> dict[str, float]:
    """Share of answers that are right as a whole, for every set of :data:`SETS`.

    Args:
        model: in evaluation.
        composer: draws the pictures.
        sources: atlas and tokenizer.
        items: at least so many answers a set, in batches of the training size.
        device: of the model.
    """
    atlas = load_atlas(sources.atlas)
    chat = Chat(sources.tokenizer)
    fonts = find_fonts(sources.atlas)
    printer = Printer(fonts, 1)
    unseen = word_list(atlas.names, unseen=True)
    buckets = {bucket.name: bucket for bucket in BUCKETS}
    out: dict[str, float] = {}
    for seed, (name, bucket, task, style, options) in enumerate(SETS):
        if style not in atlas.styles:
            continue
        maker = BatchMaker(
            atlas, chat, 10_000 + seed, fonts, style=style, noise=False, printed=unseen
        )
        right = asked = 0
        while asked < items:
            batch = maker.batch(buckets[bucket], sources.size, task=task, options=options)
            good, total = _right(model, composer, to_device(batch, printer, device))
            right, asked = right + good, asked + total
        out[name] = round(right / asked, 4)
    return out


def _right(model: DemoModel, composer: Composer, batch: DeviceBatch) -> tuple[int, int]:
    arrays = batch.arrays
    pictures, _ = composer(arrays, batch.bucket, noise=False)
    features = model.see(pictures, batch.bucket.runs)
    hidden = model(arrays["ids"].long(), features, arrays["slots"])
    logits = model.logits(hidden.index_select(0, arrays["predict"].long()))
    wrong = logits.argmax(-1) != arrays["target"].long()
    turns = int(arrays["turn"].max()) + 1
    # What must follow an answer is part of it too: a reply that never closes is not right.
    bad = torch.zeros(turns, device=wrong.device).index_add(0, arrays["turn"].long(), wrong.float())
    return int((bad == 0).sum()), turns
