"""Held-out questions: pictures and clips as files with a ``labels.jsonl`` beside them.

What is held out: the drawing styles of ``unseen-*`` sheets, eight per cent of the (name, drawing
set) cells, a tenth of the words, a font, and slow movement. A combination of three or four things
has hardly ever been seen: 837 names make 2e10 sets of four, and training draws some millions.
``k3vl eval`` asks the questions and scores the answers.

::

    python -m k3vl.demo.heldout --atlas FOLDER --out FOLDER --items 12 --redistributable
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from k3vl.demo.atlas import HELD, TRAIN, load_atlas
from k3vl.demo.floor import NameFloor
from k3vl.demo.grammar import sentence, with_article
from k3vl.demo.paint import Painter, save_clip
from k3vl.demo.scene import SceneMaker, SceneOptions
from k3vl.demo.tasks import Questioner, Turn, caption, pair_turns
from k3vl.demo.words import Printer, find_fonts, word_list

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from PIL import Image

    from k3vl.demo.atlas import Atlas
    from k3vl.demo.scene import Scene

QUICK = Path(__file__).with_name("heldout_quick")
"""The questions that come with the package."""

FLOOR = "HOG+LDA"
OPEN_SETS = ("noto", "noto-v1", "fluent-emoji-flat", "fluent-3d", "fluent-hc")
"""Drawings under Apache-2.0 and MIT, whose pictures may be passed on with a notice."""

# What the shipped configuration samples; a file shows each frame for half a second.
_SAMPLED, _FILE_RATE = 2, 24
_SLOW = 0.3  # of the way; training never moves a thing by less than half of it

_ONE = SceneOptions(items=1, shapes=False, text=False)
_SMALL = SceneOptions(items=1, shapes=False, text=False, small=True)
_TEXT = SceneOptions(items=1, text=True)
_ANY = SceneOptions()
_SIDE = 224
_METRICS = {
    "caption": ("exact", "f1"),
    "count": ("balanced", "exact"),
    "total": ("balanced", "exact"),
    "yesno": ("balanced",),
    "text": ("exact", "cer"),
}


def _several(count: int) -> SceneOptions:
    return SceneOptions(items=count, repeat=False, shapes=False, text=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """One row of the table.

    Attributes:
        task: which question is asked; ``pair`` shows two pictures.
        style: which drawings are used.
        size: width and height of the files; None draws one between 112 and 448 pixels each time.
        scenes: options, one after the other.
        printed: ``words`` or ``codes``: print only these.
        held_font: print text in a font that training never saw.
        slow: things move by less than they ever do in training.
        options: chat options that differ from the checkpoint's.
        suffix: file type.
    """

    name: str
    task: str
    style: str = TRAIN
    size: tuple[int, int] | None = (_SIDE, _SIDE)
    scenes: tuple[SceneOptions, ...] = (_ANY,)
    printed: str = ""
    held_font: bool = False
    slow: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    suffix: str = ".png"


def splits(atlas: Atlas) -> list[Split]:
    """The table for the styles that an atlas holds."""
    unseen = [style for style in atlas.styles if style not in (TRAIN, HELD)]
    return [*_naming(unseen), *_scenes(unseen), *_printed(), *_clips(unseen)]


def _naming(unseen: Sequence[str]) -> Iterator[Split]:
    four = (_several(3), _several(4))
    small = (112, 112)
    kinds = {TRAIN: "known drawings", HELD: "unseen name x style", **{s: s for s in unseen}}
    for style, kind in kinds.items():
        yield Split(name=f"name, {kind}", task="name", style=style, scenes=(_ONE,))
        yield Split(
            name=f"name at 112 px, {kind}", task="name", style=style, size=small, scenes=(_SMALL,)
        )
    for style in (TRAIN, *unseen):
        yield Split(
            name=f"caption of 3-4, {kinds[style]}", task="caption", style=style, scenes=four
        )
    yield Split(
        name="caption of 3-4, any size, JPEG",
        task="caption",
        size=None,
        scenes=four,
        suffix=".jpg",
    )
    for name, options in (
        ("thinking", {"thinking": True}),
        ("thinking, effort preamble", {"thinking": True, "thinking_effort": "max"}),
    ):
        yield Split(name=f"caption of 3-4, {name}", task="caption", scenes=four, options=options)


def _scenes(unseen: Sequence[str]) -> Iterator[Split]:
    names = {
        "count": "count of one kind",
        "total": "count of everything",
        "relation": "relation of two",
        "at": "what is at a place",
        "where": "in which of nine places",
        "yesno": "yes or no",
        "colour": "colour",
    }
    for task, name in names.items():
        yield Split(name=name, task=task)
    for style in unseen:
        for task in ("yesno", "relation"):
            yield Split(name=f"{names[task]}, {style}", task=task, style=style)
    yield Split(
        name="two pictures", task="pair", size=(168, 168), scenes=(_several(1), _several(2))
    )


def _printed() -> Iterator[Split]:
    for printed, name in (("words", "unseen words"), ("codes", "codes")):
        for held, font in ((False, "known fonts"), (True, "unseen font")):
            yield Split(
                name=f"{name}, {font}",
                task="text",
                scenes=(_TEXT,),
                printed=printed,
                held_font=held,
            )


def _clips(unseen: Sequence[str]) -> Iterator[Split]:
    plain = {"task": "video", "size": (112, 112), "suffix": ".mp4"}
    for style in (TRAIN, *unseen):
        kind = "known drawings" if style == TRAIN else style
        for frames in (4, 8):
            scenes = (SceneOptions(frames=frames),)
            name = f"clip of {frames} frames, {kind}"
            yield Split(name=name, style=style, scenes=scenes, **plain)  # type: ignore[arg-type]
    scenes = (SceneOptions(frames=8),)
    yield Split(name="clip, unseen slow speed", slow=True, scenes=scenes, **plain)  # type: ignore[arg-type]


# ---------------------------------------------------------------------- files


@dataclass(frozen=True, slots=True)
class _Asked:
    """A question about scenes."""

    scenes: tuple[Scene, ...]
    turn: Turn


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
    for number, asked in zip(range(items), _questions(split, atlas, seed), strict=False):
        names = []
        for part, scene in enumerate(asked.scenes):
            size = split.size or (rng.randint(112, 448), rng.randint(112, 448))
            names.append(f"{stem}-{number:03d}{'ab'[part] if split.task == 'pair' else ''}")
            names[-1] += split.suffix
            _save(painter.frames(scene, *size), folder / names[-1])
        record: dict[str, Any] = {
            "files": names,
            "prompt": asked.turn.question,
            "answer": asked.turn.answer,
            "metric": list(_METRICS.get(split.task, ("exact",))),
            "split": split.name,
        }
        if split.options:
            record["options"] = split.options
        if floor is not None and split.task in ("name", "caption"):
            record["baselines"] = {FLOOR: _guess(split.task, asked.scenes[0], atlas, floor)}
        lines.append(json.dumps(record) + "\n")
    with (folder / "labels.jsonl").open("a", encoding="utf-8") as file:
        file.writelines(lines)


def _questions(split: Split, atlas: Atlas, seed: int) -> Iterator[_Asked]:
    """Without end."""
    unseen = word_list(atlas.names, unseen=True)
    printed = unseen if split.task == "text" else None
    maker = SceneMaker(atlas, seed, style=split.style, printed=printed)
    questions = Questioner(maker)
    made = 0
    while True:
        options = split.scenes[made % len(split.scenes)]
        scene = maker.scene(options)
        if split.task == "pair":
            pair = (scene, maker.scene(options))
            found = _Asked(pair, pair_turns(maker.rng, pair, len(atlas.names))[0])
        else:
            turn = questions.ask(split.task, scene)
            if turn is None or (
                split.printed and (turn.answer in unseen) != (split.printed == "words")
            ):
                continue
            if split.slow and not _slow_down(scene):
                continue
            found = _Asked((scene,), turn)
        made += 1
        yield found


def _slow_down(scene: Scene) -> bool:
    """Let the first thing go a shorter way; False where it does not move."""
    if scene.event is None or scene.event.kind in ("appear", "disappear"):
        return False
    start, end = scene.event.path
    scene.event = replace(scene.event, path=(start, start + _SLOW * (end - start)))
    return True


def _guess(task: str, scene: Scene, atlas: Atlas, floor: NameFloor) -> str:
    """The floor's answer: each drawing by itself, and where it lies is a gift."""
    guessed = [
        replace(item, name=atlas.names[floor.name(atlas.sprites[item.sprite])])
        for item in scene.items
    ]
    if task == "caption":
        return caption(guessed, len(atlas.names))
    return sentence(with_article(guessed[0].name))


def _save(frames: Sequence[Image.Image], path: Path) -> None:
    if path.suffix == ".mp4":
        save_clip(frames, path, _FILE_RATE, repeat=_FILE_RATE // _SAMPLED)
    else:
        frames[0].save(path, quality=90)


# ---------------------------------------------------------------------- the package's own


def quick_splits(atlas: Atlas) -> list[Split]:
    """Those of :func:`splits` that drawings of an open licence can show, as small files."""
    chosen = [
        split
        for split in splits(atlas)
        if split.style in (TRAIN, HELD) and "at 112 px" not in split.name
    ]
    return [replace(split, suffix=".webp") if split.suffix == ".png" else split for split in chosen]


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


if __name__ == "__main__":
    main()
