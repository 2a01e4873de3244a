"""``k3vl caption``: puts the parts of ``k3vl.app.captioning`` together for one run."""

from __future__ import annotations

import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from k3vl.app.captioning.durable import try_place
from k3vl.app.captioning.engines import LOCAL_PARALLEL, Engine, LocalEngine
from k3vl.app.captioning.files import Choice, is_folder
from k3vl.app.captioning.journal import Journal
from k3vl.app.captioning.listing import Listing, find_files, spool
from k3vl.app.captioning.media import MediaLoader
from k3vl.app.captioning.needs import Needs
from k3vl.app.captioning.outputs import JsonLinesOutput, TableOutput, format_of, is_regular
from k3vl.app.captioning.pages import Pages
from k3vl.app.captioning.preflight import (
    Survey,
    collision_error,
    estimate,
    report_record,
    report_text,
    survey,
)
from k3vl.app.captioning.progress import Bar, JsonMeter, Terminal
from k3vl.app.captioning.prompts import PATH_VARIABLES, check_variables
from k3vl.app.captioning.report import ContactSheet
from k3vl.app.captioning.rows import Origin
from k3vl.app.captioning.run import Plan, Run, TooManyErrors
from k3vl.app.captioning.shards import is_shard
from k3vl.app.captioning.sidecars import Sidecars
from k3vl.app.captioning.tables import TABLE_SUFFIXES, ColumnMap
from k3vl.app.captioning.tar_output import TarOutput
from k3vl.app.captioning.worker import Worker
from k3vl.app.extras import needs_extra
from k3vl.app.inspect import media_config
from k3vl.app.output import printable, write_record, write_text
from k3vl.errors import ConfigError
from k3vl.pipeline import Pipeline
from k3vl.vision.limits import DEFAULT_LIMITS, MediaLimits
from k3vl.vision.processor import MediaProcessor
from k3vl.vision.source import DEFAULT_POLICY, FetchPolicy

if TYPE_CHECKING:
    from collections.abc import Iterator

    from k3vl.app.captioning.items import Item
    from k3vl.app.captioning.options import CaptionOptions
    from k3vl.app.captioning.outputs import Output
    from k3vl.app.captioning.progress import Meter
    from k3vl.app.captioning.rows import Row

__all__ = ["caption", "find_files"]

JOURNAL_NAME = ".k3vl-caption.journal"


def caption(options: CaptionOptions) -> int:
    """Run; returns how many items have no caption, earlier failures included.

    Raises:
        ConfigError: nothing could be done, or an output cannot be written.
        K3VLError: the model cannot be loaded.
    """
    sidecars, place = _sidecars(options), _journal_path(options)
    with ExitStack() as stack:
        listing = _listing(stack, options)
        _check(options, listing)
        journal = _open_journal(stack, options, place) if place and place.exists() else None
        surveyed = survey(listing, options.prompts, sidecars, journal)
        if not surveyed.sources and surveyed.complete:
            raise _nothing_there(options)
        if options.run.dry_run:
            _dry_run(options, listing, sidecars, journal, surveyed)
            return 0
        _check_existing(options, surveyed, journal)
        if options.outputs.report is not None:
            try_place(options.outputs.report)
        outputs = _outputs(stack, options, journal)
        if journal is None and place is not None:
            journal = _open_journal(stack, options, place)
            _adopt(journal, outputs)
        engine = _engine(options)
        stack.callback(engine.close)
        _note_changes(options, journal)
        plan = Plan(
            listing=listing,
            loader=_loader(options, engine.processor),
            prompts=options.prompts,
            engine=engine,
            journal=journal,
            outputs=outputs,
            sidecars=sidecars,
            policy=options.outputs.policy,
            retry_failed=options.run.retry_failed,
            max_errors=options.run.max_errors,
            item_seconds=options.run.item_seconds,
            reasoning=options.outputs.reasoning,
            thumbnails=options.outputs.report is not None,
        )
        return _go(options, plan, surveyed.sources if surveyed.complete else None)


def _nothing_there(options: CaptionOptions) -> ConfigError:
    names = ", ".join(map(printable, options.inputs.arguments))
    return ConfigError(f"no pictures or clips there: {names}")


def _go(options: CaptionOptions, plan: Plan, sources: int | None) -> int:
    """The run between its first and its last word."""
    per_source = len(options.prompts.prompts) if options.prompts.several else 1
    total = sources * per_source if sources is not None and not _expands(options) else None
    sheet = None
    if options.outputs.report is not None:
        title = f"{plan.engine.name}: {', '.join(options.inputs.arguments[:3])}"
        sheet = ContactSheet(options.outputs.report, title)
    meter = _meter(options, total)
    watcher = Terminal(as_json=options.run.as_json, meter=meter, others=[sheet] if sheet else [])
    run = Run(plan, watcher)
    stopped = finished = False
    try:
        with meter:
            try:
                run.go()
                finished = True
            except TooManyErrors:
                stopped = True
    except (KeyboardInterrupt, BrokenPipeError):
        _finish(plan, run, sheet, finished=False)
        raise
    _finish(plan, run, sheet, finished=finished)
    counts = run.counts
    if finished and not counts.done:
        raise _nothing_there(options)
    if stopped:
        click.echo(f"stopped after {counts.failed} errors; the same command goes on", err=True)
    elif not options.run.quiet:
        _last_word(run)
    return counts.failed + counts.failed_before


def _finish(plan: Plan, run: Run, sheet: ContactSheet | None, *, finished: bool) -> None:
    """Give outputs their last form, and end the journal where the run came to its end."""
    if plan.journal is not None:
        for output in plan.outputs:
            output.finish(plan.journal)
        if finished:
            made = run.counts.captioned + run.counts.failed
            plan.journal.end(made, run.counts.seconds)
    if sheet is not None:
        sheet.write(run.counts, finished=finished)


def _last_word(run: Run) -> None:
    """What would else be missed: that nothing was done, and what failed before."""
    counts = run.counts
    if counts.skipped:
        click.echo(f"{counts.skipped} captions were there and are kept", err=True)
    if counts.failed_before:
        click.echo(
            f"{counts.failed_before} failed before; --retry-failed tries them again", err=True
        )


def _meter(options: CaptionOptions, total: int | None) -> Meter:
    if options.run.progress == "json":
        return JsonMeter(total)
    wanted = options.run.progress != "none" and not options.run.quiet
    return Bar(total, shown=wanted and (sys.stderr.isatty() or options.run.progress == "bar"))


# ---------------------------------------------------------------------- the parts


def _listing(stack: ExitStack, options: CaptionOptions) -> Listing:
    inputs = options.inputs
    choice = Choice(
        include=inputs.include, exclude=inputs.exclude, follow_symlinks=inputs.follow_symlinks
    )
    names = None
    if "-" in inputs.arguments:
        names = stack.enter_context(spool(sys.stdin.buffer))
    return Listing(
        arguments=inputs.arguments,
        choice=choice,
        columns=ColumnMap.parse(inputs.columns),
        names=names,
    )


def _loader(options: CaptionOptions, processor: MediaProcessor) -> MediaLoader:
    return MediaLoader(
        processor,
        pages=Pages.parse(options.inputs.pages),
        clip_seconds=options.inputs.clip_seconds,
    )


def _sidecars(options: CaptionOptions) -> Sidecars:
    outputs = options.outputs
    paths = [Path(argument) for argument in options.inputs.arguments]
    return Sidecars(
        endings=outputs.sidecars,
        whole_name=outputs.whole_name,
        folder=outputs.sidecar_folder,
        roots=tuple(path if path.is_dir() else path.parent for path in paths if _has_tree(path)),
        several=options.prompts.several,
    )


def _has_tree(path: Path) -> bool:
    return is_folder(path) or is_shard(path.name) or path.suffix.lower() in TABLE_SUFFIXES


def _journal_path(options: CaptionOptions) -> Path | None:
    """Where the journal is; None where nothing is written that could be gone on with."""
    outputs = options.outputs
    if outputs.journal is not None:
        return outputs.journal
    regular = [path for path in outputs.files if is_regular(path)]
    if regular:
        return regular[0].with_name(f"{regular[0].name}.journal")
    if not outputs.sidecars:
        return None
    first = Path(options.inputs.arguments[0])
    if outputs.sidecar_folder is not None:
        return outputs.sidecar_folder / JOURNAL_NAME
    if is_folder(first):
        return first / JOURNAL_NAME
    return (first.parent if first.is_file() else Path()) / JOURNAL_NAME


def _open_journal(stack: ExitStack, options: CaptionOptions, path: Path) -> Journal:
    if options.outputs.sidecar_folder is not None and path.parent == options.outputs.sidecar_folder:
        path.parent.mkdir(parents=True, exist_ok=True)
    return stack.enter_context(Journal(path, options.settings(), options.outputs.policy))


def _outputs(stack: ExitStack, options: CaptionOptions, journal: Journal | None) -> list[Output]:
    """Open every output, so that a wrong place is found before the model is loaded."""
    anew = options.outputs.policy == "overwrite"
    opened: list[Output] = []
    for path in options.outputs.files:
        form = format_of(path, options.outputs.form)
        if form != "jsonl" and journal is None and path.exists() and not anew:
            raise ConfigError(
                f"{printable(path)}: exists, and no journal tells what is in it; choose another "
                "name, or --on-existing overwrite"
            )
        if form != "jsonl" and not is_regular(path):
            raise ConfigError(f"{printable(path)}: a {form} output must be a regular file")
        if form == "tar":
            opened.append(TarOutput(path, afresh=anew and journal is None))
        elif form == "jsonl":
            opened.append(JsonLinesOutput(path))
        else:
            opened.append(TableOutput(path, form))
        stack.callback(opened[-1].close)
    for output in opened:
        if journal is None and isinstance(output, JsonLinesOutput) and output.is_foreign():
            raise ConfigError(
                f"{printable(output.path)}: holds lines that are no captions; choose another name"
            )
    return opened


def _adopt(journal: Journal, outputs: list[Output]) -> None:
    """Take over what a JSON Lines output holds from a time without a journal."""
    for output in outputs:
        if isinstance(output, JsonLinesOutput) and is_regular(output.path):
            journal.adopt(_with_ids(output.rows()))


def _with_ids(rows: Iterator[Row]) -> Iterator[Row]:
    for row in rows:
        yield {"id": row.get("path"), "prompt_id": "default", **row}


def _engine(options: CaptionOptions) -> Engine:
    """Load the model, or reach the endpoint."""
    model, limits, policy = options.model, _limits(options), _policy(options)
    if model.base_url is None:
        pipeline = Pipeline.load(
            model.model,
            device=model.device,
            tensor_parallel=model.tensor_parallel,
            limits=limits,
            policy=policy,
        )
        local = LocalEngine(
            pipeline,
            parallel=model.concurrency or LOCAL_PARALLEL,
            min_confidence=model.min_confidence,
        )
        try:
            if options.prompts.schema is not None:
                local.check(options.prompts.schema)
        except BaseException:
            local.close()
            raise
        return local
    with needs_extra("caption", "--base-url"):
        from k3vl.app.captioning.remote import RemoteEngine

    engine = RemoteEngine(
        model.base_url,
        model.model,
        MediaProcessor(media_config("k3"), limits=limits, policy=policy),
        api_key=model.api_key,
        parallel=model.concurrency or 8,
        retries=model.retries,
    )
    try:
        engine.check()
    except BaseException:
        engine.close()
        raise
    return engine


def _limits(options: CaptionOptions) -> MediaLimits:
    seconds = options.run.item_seconds
    if seconds is None:
        return DEFAULT_LIMITS
    return replace(
        DEFAULT_LIMITS, max_decode_seconds=min(DEFAULT_LIMITS.max_decode_seconds, seconds)
    )


def _policy(options: CaptionOptions) -> FetchPolicy:
    seconds = options.run.item_seconds or DEFAULT_POLICY.total_seconds
    return replace(
        DEFAULT_POLICY,
        total_seconds=min(DEFAULT_POLICY.total_seconds, seconds),
        allow_private_networks=options.inputs.private_networks,
    )


# ---------------------------------------------------------------------- before the run


def _check(options: CaptionOptions, listing: Listing) -> None:
    """Refuse what cannot work, before anything is touched."""
    outputs, inputs = options.outputs, options.inputs
    if "" in inputs.arguments:
        raise ConfigError("an empty path is given")
    if "json" in outputs.sidecars and outputs.policy in ("append", "prepend"):
        raise ConfigError(f"--on-existing {outputs.policy} has no meaning for JSON sidecars")
    _check_places(options, listing)
    Pages.parse(inputs.pages)
    if options.model.base_url is not None and options.model.min_confidence:
        raise ConfigError("--min-confidence: an endpoint's confidence is not known")
    prompts = options.prompts
    if prompts.schema is not None and (prompts.prefix or prompts.suffix or prompts.trigger):
        raise ConfigError("--json-schema: with a prefix, suffix or trigger it would not be JSON")
    tables = any(Path(name).suffix.lower() in TABLE_SUFFIXES for name in inputs.arguments)
    has_columns = tables or listing.has_shards or "-" in inputs.arguments
    check_variables(options.prompts, None if has_columns else PATH_VARIABLES)


def _check_places(options: CaptionOptions, listing: Listing) -> None:
    """Nothing is written to a file that is read, or that something else is written to."""
    outputs = options.outputs
    given = [*(("--output", path) for path in outputs.files)]
    for flag, path in (("--report", outputs.report), ("--journal", _journal_path(options))):
        given += [(flag, path)] if path is not None else []
    written = [(flag, path) for flag, path in given if is_regular(path)]
    if len({os.path.realpath(path) for _, path in written}) < len(written):
        raise ConfigError(f"{written[0][0]}: the same file is given twice")
    present = {_identity(path): (flag, path) for flag, path in written if path.exists()}
    if not present:
        return
    for name in listing.given():
        if flag_and_path := present.get(_identity(name)):
            flag, path = flag_and_path
            raise ConfigError(f"{flag} {printable(path)}: is an input")


def _identity(path: Path | str) -> tuple[int, int] | None:
    """Of the file behind a name; None where there is none."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return None
    return found.st_dev, found.st_ino


def _check_existing(options: CaptionOptions, surveyed: Survey, journal: Journal | None) -> None:
    if surveyed.collisions:
        raise collision_error(surveyed.collisions)
    if options.outputs.policy != "error" or (journal is not None and journal.resumed):
        return
    if surveyed.existing:
        raise ConfigError(f"{surveyed.existing} captions exist already (--on-existing error)")
    for path in options.outputs.files:
        if path.is_file() and path.stat().st_size:
            raise ConfigError(f"{printable(path)}: exists already (--on-existing error)")


def _note_changes(options: CaptionOptions, journal: Journal | None) -> None:
    """Say so where captions that are kept were made in another way."""
    if journal is None or options.run.quiet or options.outputs.policy != "skip":
        return
    changed = [name for name in journal.changed if name != "retry_failed"]
    if changed and len(journal):
        click.echo(
            f"note: not as in the last run: {', '.join(changed)}; captions that exist are kept",
            err=True,
        )


def _expands(options: CaptionOptions) -> bool:
    inputs = options.inputs
    return inputs.clip_seconds is not None or inputs.pages not in ("first", "clip")


def _dry_run(
    options: CaptionOptions,
    listing: Listing,
    sidecars: Sidecars,
    journal: Journal | None,
    surveyed: Survey,
) -> None:
    """Say what a run would do; nothing is written."""
    remote = options.model.base_url is not None
    config = media_config("k3" if remote else options.model.model)
    processor = MediaProcessor(config, limits=_limits(options), policy=_policy(options))
    needs = Needs(
        journal=journal,
        sidecars=sidecars,
        policy=options.outputs.policy,
        retry_failed=options.run.retry_failed,
    )
    found = estimate(listing, _loader(options, processor), processor, options.prompts, needs)
    seconds = journal.seconds_per_item if journal is not None else None
    source = "the last run"
    if seconds is None and found.sample and not remote:
        seconds, source = _measure(options, found.sample, sidecars), "a trial"
    record = report_record(found, surveyed, seconds, source)
    if options.run.as_json:
        write_record(record)
    else:
        write_text(report_text(record))


def _measure(options: CaptionOptions, sample: list[Item], sidecars: Sidecars) -> float:
    """Seconds for an item, by captioning a few together and keeping nothing."""
    engine = _engine(options)
    worker = Worker(
        loader=_loader(options, engine.processor),
        prompts=options.prompts,
        engine=engine,
        sidecars=sidecars,
        origin=Origin(model=engine.name, revision=engine.revision),
        item_seconds=options.run.item_seconds,
        thumbnails=False,
    )
    start = time.monotonic()
    try:
        with ThreadPoolExecutor(engine.parallel) as pool:
            list(pool.map(lambda item: worker.caption(item, options.prompts.chosen(item)), sample))
    finally:
        engine.close()
    captions = sum(len(options.prompts.chosen(item)) for item in sample)
    return (time.monotonic() - start) / captions
