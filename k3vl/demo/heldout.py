"""Held-out questions: pictures and clips as files with a ``labels.jsonl`` beside them.

What is held out: the drawing styles of ``unseen-*`` sheets, eight per cent of the (name, drawing
set) cells, a tenth of the words, four fonts, and slow movement. A combination of three or four
things has hardly ever been seen: 837 names make 2e10 sets of four, and training draws some
millions. ``k3vl eval`` asks the questions and scores the answers.

::

    python -m k3vl.demo.heldout --atlas FOLDER --out FOLDER --items 12 --redistributable
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from k3vl.demo.atlas import HELD, TRAIN, load_atlas
from k3vl.demo.charts import draw_chart
from k3vl.demo.floor import NameFloor
from k3vl.demo.grammar import sentence, with_article
from k3vl.demo.heldout_scenes import FILE_RATE, HeldOut, Split
from k3vl.demo.paint import Painter, save_clip
from k3vl.demo.scene import SceneOptions
from k3vl.demo.talks import about
from k3vl.demo.tasks import caption
from k3vl.demo.turns import Turn
from k3vl.demo.words import Printer, find_fonts

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from PIL import Image

    from k3vl.demo.atlas import Atlas
    from k3vl.demo.heldout_scenes import Asked
    from k3vl.demo.scene import Scene

QUICK = Path(__file__).with_name("heldout_quick")
"""The questions that come with the package."""

FLOOR = "HOG+LDA"
OPEN_SETS = ("noto", "noto-v1", "fluent-emoji-flat", "fluent-3d", "fluent-hc")
"""Drawings under Apache-2.0 and MIT, whose pictures may be passed on with a notice."""

# The unseen style about which everything is asked; of the others only names.
_ALL_TASKS = "openmoji"
_SAMPLED = 2  # frames a second that the shipped configuration looks at
_ONE = SceneOptions(items=1, shapes=False, text=False)
_SMALL = SceneOptions(items=1, shapes=False, text=False, small=True)
_TEXT = SceneOptions(items=1, text=True, digits=False)
_NUMBERS = tuple(
    SceneOptions(items=n, text=True, digits=True, repeat=False, shapes=False) for n in range(4)
)
_TWO_EVENTS = (SceneOptions(items=2, frames=8, events=2),)
_MOST_EARLIER = 2  # messages before a new picture
_THINKING = {"thinking": True}
_EFFORT = {"thinking": True, "thinking_effort": "max"}
_METRICS = {
    "caption": ("exact", "f1"),
    "count": ("balanced", "exact"),
    "total": ("balanced", "exact"),
    "yesno": ("balanced",),
    "does": ("balanced",),
    "text": ("exact", "cer"),
    "digits": ("exact", "cer"),
    "json": ("json",),
    "tool": ("tool_call",),
}
_NAMES = {
    "count": "count of one kind",
    "total": "count of everything",
    "relation": "relation of two",
    "at": "what is at a place",
    "where": "in which of nine places",
    "yesno": "yes or no",
    "colour": "colour",
}


def _several(count: int) -> SceneOptions:
    return SceneOptions(items=count, repeat=False, shapes=False, text=False)


_FOUR = (_several(3), _several(4))


def splits(atlas: Atlas) -> list[Split]:
    """The table for the styles that an atlas holds."""
    unseen = [style for style in atlas.styles if style not in (TRAIN, HELD)]
    named, unseen = unseen, [style for style in unseen if style == _ALL_TASKS]
    return [
        *_naming(named),
        *_scenes(unseen),
        *_printed(),
        *_pairs(),
        *_clips(unseen),
        *_forms(),
        *_thinking(),
        *_chats(),
    ]


def _naming(unseen: Sequence[str]) -> Iterator[Split]:
    small = (112, 112)
    kinds = {TRAIN: "known drawings", HELD: "unseen name x style", **{s: s for s in unseen}}
    for style, kind in kinds.items():
        yield Split(name=f"name, {kind}", task="name", style=style, scenes=(_ONE,))
        yield Split(
            name=f"name at 112 px, {kind}", task="name", style=style, size=small, scenes=(_SMALL,)
        )
    name = "caption of 3-4, any size, JPEG"
    yield Split(name=name, task="caption", size=None, scenes=_FOUR, suffix=".jpg")


def _scenes(unseen: Sequence[str]) -> Iterator[Split]:
    for style in (TRAIN, *unseen):
        name = f"caption of 3-4, {'known drawings' if style == TRAIN else style}"
        yield Split(name=name, task="caption", style=style, scenes=_FOUR)
    for task, name in _NAMES.items():
        yield Split(name=name, task=task)
    for style in unseen:
        for task in ("yesno", "relation"):
            yield Split(name=f"{_NAMES[task]}, {style}", task=task, style=style)


def _printed() -> Iterator[Split]:
    for printed, name in (("words", "unseen words"), ("codes", "codes")):
        for held, font in ((False, "known fonts"), (True, "unseen fonts")):
            yield Split(
                name=f"{name}, {font}",
                task="text",
                scenes=(_TEXT,),
                printed=printed,
                held_font=held,
            )
    yield Split(name="numbers", task="digits", scenes=_NUMBERS)
    yield Split(name="bar charts", task="chart")


def _pairs() -> Iterator[Split]:
    size = (168, 168)
    yield Split(name="two pictures", task="pair", size=size, scenes=(_several(1), _several(2)))
    scenes = tuple(
        SceneOptions(items=items, shapes=shapes)
        for items in (1, 2, 3, 4)
        for shapes in (False, True)
    )
    yield Split(name="difference of two pictures", task="difference", size=size, scenes=scenes)


def _clips(unseen: Sequence[str]) -> Iterator[Split]:
    def clip(name: str, task: str, scenes: tuple[SceneOptions, ...], **fields: Any) -> Split:
        size = (112, 112)
        return Split(name=name, task=task, size=size, suffix=".mp4", scenes=scenes, **fields)

    for style in (TRAIN, *unseen):
        kind = "known drawings" if style == TRAIN else style
        for frames in (4, 8):
            scenes = (SceneOptions(frames=frames, events=1),)
            yield clip(f"clip of {frames} frames, {kind}", "video", scenes, style=style)
    slow = (SceneOptions(frames=8, events=1),)
    yield clip("clip, unseen slow speed", "video", slow, slow=True)
    yield clip("clip, order of two events", "order", _TWO_EVENTS)
    yield clip("clip, time of an event", "when", _TWO_EVENTS)


def _forms() -> Iterator[Split]:
    yield Split(name="form: one word", task="word", scenes=(_ONE,))
    yield Split(name="form: at most five words", task="five", scenes=(_several(1), _several(2)))
    yield Split(name="form: JSON", task="json", scenes=(_several(2), *_FOUR))
    yield Split(name="form: digits", task="number")
    yield Split(name="says what is not there", task="absent")
    yield Split(name="tool calls", task="tool", size=(168, 168))


def _thinking() -> Iterator[Split]:
    for name, options in (("thinking", _THINKING), ("thinking, effort preamble", _EFFORT)):
        yield Split(name=f"caption of 3-4, {name}", task="caption", scenes=_FOUR, options=options)
    for task in ("count", "relation"):
        yield Split(name=f"{_NAMES[task]}, thinking", task=task, options=_EFFORT)
    yield Split(name="bar charts, thinking", task="chart", size=(336, 224), options=_THINKING)
    yield Split(name="tool calls, thinking", task="tool", size=(168, 168), options=_THINKING)
    name = "tool calls, three declared, effort preamble"
    yield Split(name=name, task="tool", size=(168, 168), options=_EFFORT, tools=3)


def _chats() -> Iterator[Split]:
    """Each picture in a message of its own; what came before is answered right."""
    few = (_several(1), _several(2), _several(3))
    new = "new picture in a later turn"
    yield Split(name=f"{new}, name", task="name", scenes=(_ONE,), earlier=_MOST_EARLIER)
    yield Split(name=f"{new}, caption", task="caption", scenes=few, earlier=_MOST_EARLIER)
    clip = (SceneOptions(frames=4, events=1),)
    yield Split(
        name="new clip in a later turn",
        task="video",
        size=(112, 112),
        suffix=".mp4",
        scenes=clip,
        earlier=_MOST_EARLIER,
    )
    back = "earlier picture"
    yield Split(name=f"{back}, caption", task="caption", scenes=few, earlier=3, back=True)
    yield Split(name=f"{back}, what is at a place", task="at", earlier=3, back=True)


# ---------------------------------------------------------------------- files


def write_split(
    split: Split, atlas: Atlas, floor: NameFloor | None, folder: Path, items: int
) -> None:
    """Write the files of a split and append its questions to ``labels.jsonl``.

    Args:
        split: which.
        atlas: the drawings.
        floor: answers questions about names and captions too; None leaves that baseline out.
        folder: where to.
        items: so many questions.
    """
    seed = sum(split.name.encode()) + 50_000  # by name, so that a new row changes no other
    fonts = find_fonts(atlas.folder, held=split.held_font)
    painter = Painter(atlas, Printer(fonts, seed), seed)
    rng = random.Random(seed)  # noqa: S311 - scenes, not secrets
    stem = "".join(c if c.isalnum() else "-" for c in split.name)
    lines = []
    for number, asked in zip(range(items), HeldOut(split, atlas, seed), strict=False):
        files = []
        for part, scene in enumerate(asked.scenes):
            size = split.size or (rng.randint(112, 448), rng.randint(112, 448))
            letter = "abcd"[part] if len(asked.scenes) > 1 else ""
            files.append(f"{stem}-{number:03d}{letter}{split.suffix}")
            _save(_drawn(scene, size, painter, fonts), folder / files[-1])
        lines.append(json.dumps(_record(split, asked, files, atlas, floor)) + "\n")
    with (folder / "labels.jsonl").open("a", encoding="utf-8") as file:
        file.writelines(lines)


def _record(
    split: Split, asked: Asked, files: list[str], atlas: Atlas, floor: NameFloor | None
) -> dict[str, Any]:
    """A line of ``labels.jsonl``."""
    answers = [_answer(split, turn) for turn in (asked.turn, *asked.also)]
    told = len(asked.history)
    record: dict[str, Any] = {
        "files": files[told:],
        "prompt": asked.turn.question,
        # A list under "answer" is one answer that is a list.
        **({"answers": answers} if asked.also else {"answer": answers[0]}),
        "metric": list(_METRICS.get(split.task, ("exact",))),
        "split": split.name,
    }
    if told:
        record["history"] = [
            {"file": file, "prompt": turn.question, "answer": turn.answer}
            for file, turn in zip(files[:told], asked.history, strict=True)
        ]
    if options := split.options | asked.options:
        record["options"] = options
    if asked.tools:
        record["tools"] = [tool.declaration() for tool in asked.tools]
    if floor is not None and split.task in ("name", "caption") and not split.back:
        record["baselines"] = {FLOOR: _guess(split.task, asked.scenes[-1], atlas, floor)}
    return record


def _answer(split: Split, turn: Turn) -> Any:
    if turn.calls:
        return [{"name": call.tool, "arguments": dict(call.arguments)} for call in turn.calls]
    return json.loads(turn.answer) if split.task == "json" else turn.answer


def _guess(task: str, scene: Scene, atlas: Atlas, floor: NameFloor) -> str:
    """The floor's answer: each drawing by itself, and where it lies is a gift."""
    guessed = [
        replace(item, name=atlas.names[floor.name(atlas.sprites[item.sprite])])
        for item in scene.items
    ]
    if task == "caption":
        return caption(guessed, len(atlas.names))
    return sentence(with_article(guessed[0].name))


def _drawn(
    scene: Scene, size: tuple[int, int], painter: Painter, fonts: Sequence[str]
) -> list[Image.Image]:
    if scene.chart is not None:
        return [draw_chart(scene.chart, *size, fonts)]
    return painter.frames(scene, *size)


def _save(frames: Sequence[Image.Image], path: Path) -> None:
    if path.suffix == ".mp4":
        save_clip(frames, path, FILE_RATE, repeat=FILE_RATE // _SAMPLED)
    else:
        frames[0].save(path, quality=90)


# ---------------------------------------------------------------------- the package's own


def quick_splits(atlas: Atlas) -> list[Split]:
    """Those of :func:`splits` that drawings of an open licence can show, as small files.

    Conversations are missing: :func:`quick_chats` makes them of what is there.
    """
    chosen = [
        split
        for split in splits(atlas)
        if split.style in (TRAIN, HELD)
        and "at 112 px" not in split.name
        and not split.earlier
        and split.tools == 1
    ]
    return [replace(split, suffix=".webp") if split.suffix == ".png" else split for split in chosen]


def quick_chats(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The conversations of :func:`splits` about pictures that other questions brought already.

    Args:
        records: lines of a ``labels.jsonl`` with names and captions of known drawings.
    """
    one, several = (
        [r for r in records if r["split"] == name]
        for name in ("name, known drawings", "caption of 3-4, known drawings")
    )
    out = []
    for alone, told in zip(one, several, strict=True):
        out.append(_after([told], alone, "new picture in a later turn, name"))
        out.append(_after([alone], told, "new picture in a later turn, caption"))
        back = about(Turn("caption", told["prompt"], ""), "first picture")
        if back is not None:
            question = told | {"prompt": back.question, "files": []}
            out.append(_after([told, alone], question, "earlier picture, caption"))
    return sorted(out, key=lambda record: str(record["split"]))


def _after(
    before: Sequence[dict[str, Any]], question: dict[str, Any], split: str
) -> dict[str, Any]:
    history = [
        {"files": r["files"], "prompt": r["prompt"], "answer": r.get("answer") or r["answers"][0]}
        for r in before
    ]
    record = {key: value for key, value in question.items() if key != "baselines"}
    return record | {"split": split, "history": history}


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m k3vl.demo.heldout", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--atlas", type=Path, required=True, help="folder with sheets and fonts")
    parser.add_argument("--out", type=Path, required=True, help="a new folder for the files")
    parser.add_argument("--items", type=int, default=12, help="questions of a split")
    parser.add_argument(
        "--redistributable",
        action="store_true",
        help="only drawings under Apache-2.0 and MIT, as WebP: the set that comes with the package",
    )
    args = parser.parse_args(arguments)
    atlas = load_atlas(args.atlas)
    floor = NameFloor(atlas)
    args.out.mkdir(parents=True)
    chosen = quick_splits(atlas) if args.redistributable else splits(atlas)
    shown = atlas.only(OPEN_SETS) if args.redistributable else atlas
    for split in chosen:
        write_split(split, shown, floor, args.out, args.items)
    if args.redistributable:
        labels = args.out / "labels.jsonl"
        records = [json.loads(line) for line in labels.read_text("utf-8").splitlines()]
        lines = [json.dumps(record) + "\n" for record in quick_chats(records)]
        with labels.open("a", encoding="utf-8") as file:
            file.writelines(lines)


if __name__ == "__main__":
    main()
