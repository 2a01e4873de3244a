"""Before the run: counts, places that cannot be written, names that collide, and the dry run."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from k3vl.app.captioning.items import Item, make_key
from k3vl.app.captioning.media import open_page
from k3vl.app.captioning.sidecars import existing
from k3vl.app.output import printable
from k3vl.errors import ConfigError, MediaError
from k3vl.vision.image import read_orientation
from k3vl.vision.plan import frame_budget, plan_frame, plan_image
from k3vl.vision.video import open_video

if TYPE_CHECKING:
    from pathlib import Path

    from k3vl.app.captioning.journal import Journal
    from k3vl.app.captioning.listing import Listing
    from k3vl.app.captioning.media import Fetched, MediaLoader
    from k3vl.app.captioning.needs import Needs
    from k3vl.app.captioning.prompts import Prompts
    from k3vl.app.captioning.sidecars import Sidecars
    from k3vl.vision.processor import MediaProcessor

_SHOWN = 10
SAMPLE = 16
"""Items that a trial captions to measure the time."""


@dataclass(slots=True)
class Survey:
    """What the inputs' names tell.

    Attributes:
        sources: how many there are; shards are not counted.
        complete: nothing was left out.
        existing: captions that are there already.
        collisions: groups of names that would share a sidecar.
    """

    sources: int = 0
    complete: bool = True
    existing: int = 0
    collisions: list[tuple[str, ...]] = field(default_factory=list)


def survey(
    listing: Listing, prompts: Prompts, sidecars: Sidecars, journal: Journal | None
) -> Survey:
    """Go through all names once; a second time where some collide.

    Raises:
        ConfigError: an input cannot be listed, or sidecars cannot be written somewhere.
    """
    found = Survey(complete=not listing.has_shards)
    places: set[bytes] = set()
    twice: set[bytes] = set()
    ids: set[bytes] = set()
    folders: set[Path] = set()
    for source in listing.sources(light=True):
        found.sources += 1
        item = Item(source)
        for prompt in prompts.chosen(item):
            known = journal is not None and journal.is_captioned(make_key(item.id, prompt.id))
            found.existing += known or existing(sidecars.paths(item, prompt.id))
        base = sidecars.base(source) if sidecars.endings else None
        if base is None:
            continue
        _check_folder(base.parent, folders)
        this = make_key(source.id, "")
        if this not in ids:
            place = _digest(base)
            (twice if place in places else places).add(place)
        ids.add(this)
    if twice:
        groups: dict[str, list[str]] = {}
        for source in listing.sources(light=True):
            base = sidecars.base(source)
            if base is not None and _digest(base) in twice:
                names = groups.setdefault(str(base), [])
                if source.path not in names:
                    names.append(source.path)
        found.collisions = [tuple(names) for names in groups.values()]
    return found


def _digest(path: Path) -> bytes:
    return hashlib.sha256(os.fsencode(path)).digest()[:16]


def _check_folder(folder: Path, known: set[Path]) -> None:
    if folder in known:
        return
    if len(known) < 10_000:
        known.add(folder)
    place = folder
    while not place.exists() and place != place.parent:
        place = place.parent
    if place.exists() and not os.access(place, os.W_OK | os.X_OK):
        raise ConfigError(f"{printable(folder)}: sidecars cannot be written there")


def collision_error(collisions: list[tuple[str, ...]]) -> ConfigError:
    """One line that names some of them."""
    shown = "; ".join(" and ".join(map(printable, group)) for group in collisions[:3])
    more = f" and {len(collisions) - 3} more" if len(collisions) > 3 else ""
    return ConfigError(
        f"these would share a sidecar: {shown}{more}; --sidecar-name full keeps them apart"
    )


# ---------------------------------------------------------------------- the dry run


@dataclass(slots=True)
class Estimate:
    """What a dry run found.

    Attributes:
        captions: how many would be made, or tried.
        pictures, clips: items that they are of.
        existing, failed_before: captions that would not be made again.
        media_tokens: visual tokens, by the processor's own plan, once for each prompt.
        unreadable: the first items that cannot be used, with the reason.
        num_unreadable: how many there are.
        sample: the first items that can be used.
    """

    captions: int = 0
    pictures: int = 0
    clips: int = 0
    existing: int = 0
    failed_before: int = 0
    media_tokens: int = 0
    unreadable: list[tuple[str, str]] = field(default_factory=list)
    num_unreadable: int = 0
    sample: list[Item] = field(default_factory=list)


def estimate(
    listing: Listing,
    loader: MediaLoader,
    processor: MediaProcessor,
    prompts: Prompts,
    needs: Needs,
) -> Estimate:
    """Plan every item from its header, without decoding pixels.

    Args:
        listing, loader: where items come from.
        processor: plans them.
        prompts, needs: which captions would be made.
    """
    found = Estimate()
    for source in listing.sources():
        for item in loader.expand(source):
            states = [needs.state(item, prompt) for prompt in prompts.chosen(item)]
            count = states.count("needed")
            found.existing += states.count("captioned") + states.count("exists")
            found.failed_before += states.count("failed")
            if not count:
                continue
            found.captions += count
            try:
                tokens, is_clip = planned_tokens(loader.fetch(source), item, processor)
            except MediaError as exc:
                found.num_unreadable += 1
                if len(found.unreadable) < _SHOWN:
                    found.unreadable.append((item.id, str(exc)))
                continue
            found.pictures += not is_clip
            found.clips += is_clip
            found.media_tokens += count * tokens
            if len(found.sample) < SAMPLE:
                found.sample.append(item)
    return found


def planned_tokens(fetched: Fetched, item: Item, processor: MediaProcessor) -> tuple[int, bool]:
    """Visual tokens of an item, and whether it is a clip.

    Raises:
        MediaError: its header says that it cannot be used.
    """
    config, limits = processor.config, processor.limits
    if fetched.kind == "image" and not item.piece.animated:
        data = fetched.data
        assert isinstance(data, bytes)
        image = open_page(data, item.piece.page or 1, limits)
        width, height = image.size
        if read_orientation(image, []) >= 5:
            width, height = height, width
        return plan_image(width, height, config).num_tokens, False
    with open_video(fetched.data, limits) as clip:
        plan = plan_frame(clip.width, clip.height, config)
        budget = frame_budget(plan, config, limits)
        timeline = clip.timeline
        if item.piece.start is not None and item.piece.end is not None:
            inside = [at for at in timeline.times if item.piece.start <= at < item.piece.end]
            timeline = type(timeline)(tuple(at - inside[0] for at in inside), timeline.fps)
        frames = len(timeline.choose(config.sample_fps, budget))
    groups = -(-frames // config.temporal_merge_kernel_size)
    return groups * plan.num_tokens, True


def report_record(
    found: Estimate, surveyed: Survey, seconds_per_caption: float | None, source: str
) -> dict[str, Any]:
    """The dry run's record; ``source`` is where the seconds were measured."""
    seconds = None if seconds_per_caption is None else found.captions * seconds_per_caption
    return {
        "captions": found.captions,
        "pictures": found.pictures,
        "clips": found.clips,
        "existing": found.existing,
        "failed_before": found.failed_before,
        "unreadable": found.num_unreadable,
        "unreadable_examples": [{"id": name, "error": why} for name, why in found.unreadable],
        "media_tokens": found.media_tokens,
        "collisions": [list(group) for group in surveyed.collisions],
        "seconds": None if seconds is None else round(seconds, 3),
        "seconds_measured_on": None if seconds is None else source,
    }


def report_text(record: dict[str, Any]) -> str:
    """The dry run for people."""
    lines = [
        f"captions to make: {record['captions']:,} "
        f"({record['pictures']:,} pictures, {record['clips']:,} clips)",
        f"media tokens: {record['media_tokens']:,}",
    ]
    if record["existing"]:
        lines.append(f"there already: {record['existing']:,}")
    if record["failed_before"]:
        lines.append(f"failed before: {record['failed_before']:,}")
    if record["unreadable"]:
        lines.append(f"cannot be used: {record['unreadable']:,}")
        lines += [
            f"  {printable(entry['id'])}: {entry['error']}"
            for entry in record["unreadable_examples"]
        ]
    for group in record["collisions"][:_SHOWN]:
        lines.append("would share a sidecar: " + ", ".join(map(printable, group)))
    if record["seconds"] is None:
        lines.append("time: unknown, there is no earlier run to go by")
    else:
        lines.append(f"time: about {record['seconds']:,.1f} s, by {record['seconds_measured_on']}")
    return "\n".join(lines) + "\n"
