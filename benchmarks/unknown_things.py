"""How sure the demo model is of what it cannot know: drawings of things that its world lacks.

python benchmarks/unknown_things.py --packages PACKAGES --output benchmarks/unknown_things.json

Faces, people, flags and symbols are left out of the closed world, but Noto draws them in the style
that the model knows best. They are asked about beside drawings of known names from the same set;
every answer about the former is wrong, and the threshold of confidence should withhold it.
``--packages`` is the folder that ``python -m k3vl.demo.build_atlas`` keeps.
"""

import argparse
import json
import random
from pathlib import Path
from tempfile import TemporaryDirectory

from PIL import Image

from k3vl.app.evaluation.ask import LocalAsked
from k3vl.app.evaluation.labels import Question
from k3vl.app.evaluation.report import provenance
from k3vl.app.evaluation.run import ask_all
from k3vl.app.evaluation.scores import score, wilson
from k3vl.demo.atlas import CELL, is_held
from k3vl.demo.build_atlas import draw
from k3vl.demo.grammar import sentence, with_article
from k3vl.demo.pack import CHECKPOINT
from k3vl.demo.sources import GROUPS, icon_set, read_concepts
from k3vl.pipeline import Pipeline

LEFT_OUT = ("smileys-emotion", "people-body", "symbols", "flags")
SIDE = 224


def picture(cell, rng):
    """The drawing on a light ground, half to all of the picture's height."""
    size = rng.randint(SIDE // 2, SIDE)
    drawing = Image.frombytes("RGBA", (CELL, CELL), cell).resize((size, size))
    ground = tuple(rng.randint(190, 255) for _ in range(3))
    image = Image.new("RGB", (SIDE, SIDE), ground)
    image.paste(drawing, (rng.randint(0, SIDE - size), rng.randint(0, SIDE - size)), drawing)
    return image


def questions(packages, groups, items, folder, seed):
    """Files of single drawings, and what is asked about them."""
    rng = random.Random(seed)
    concepts = read_concepts(packages / "emojibase-data", groups)
    names = {c["hex"]: c["name"].replace("\u2019", "'").lower() for c in concepts}
    drawings = list(icon_set(packages / "@iconify-json" / "noto", concepts, "noto"))
    rng.shuffle(drawings)
    for drawing in drawings:
        if is_held(drawing.hex, "noto") or (cell := draw(drawing)) is None:
            continue
        path = folder / f"{seed}-{drawing.hex}.png"
        picture(cell, rng).save(path)
        answer = sentence(with_article(names[drawing.hex]))
        yield Question(files=(path,), prompt="What is this?", answers=(answer,))
        items -= 1
        if not items:
            return


def summary(results, threshold):
    sure = [r.told is not None and (r.told.confidence or 0) >= threshold for r in results]
    right = [score("exact", r.said, r.question.answers).got for r in results]
    return {
        "n": len(results),
        "right": sum(right) / len(results),
        "answered": [sum(sure) / len(results), *wilson(sum(sure), len(results))],
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--packages", type=Path, required=True)
    parser.add_argument("--items", type=int, default=200)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    config = json.loads((CHECKPOINT / "generation_config.json").read_text())
    threshold = config["min_confidence"]
    report = provenance("demo") | {"threshold": threshold}
    with TemporaryDirectory() as folder, Pipeline.load("demo") as pipeline:
        for seed, (name, groups) in enumerate({"known": GROUPS, "unknown": LEFT_OUT}.items()):
            asked = list(questions(args.packages, groups, args.items, Path(folder), seed))
            results = list(ask_all(asked, LocalAsked(pipeline), blanks=0, in_flight=16))
            report[name] = summary(results, threshold)
    args.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
