"""What a run is told: plain values, filled by the command line."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from pathlib import Path

    from k3vl.app.captioning.outputs import Format
    from k3vl.app.captioning.prompts import Prompts
    from k3vl.app.captioning.sidecars import Policy
    from k3vl.load import Device


@dataclass(frozen=True, slots=True, kw_only=True)
class InputOptions:
    """Where items come from; see ``listing.py``."""

    arguments: tuple[str, ...]
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    follow_symlinks: bool = False
    columns: tuple[str, ...] = ()
    pages: str = "first"
    clip_seconds: float | None = None
    private_networks: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOptions:
    """Where captions go.

    Attributes:
        files: output files; the kind is by ending, else ``form``, else JSON Lines.
        form: kind of files whose ending says nothing.
        sidecars: endings of sidecars.
        whole_name: sidecars keep the picture's ending in their name.
        sidecar_folder: a tree of their own for sidecars.
        journal: None is beside the first output, or in the first folder.
        policy: what is done with captions that exist.
        reasoning: rows hold the think channel.
        report: the contact sheet; None makes none.
    """

    files: tuple[Path, ...] = ()
    form: Format | None = None
    sidecars: tuple[str, ...] = ()
    whole_name: bool = False
    sidecar_folder: Path | None = None
    journal: Path | None = None
    policy: Policy = "skip"
    reasoning: bool = False
    report: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """How the run goes.

    Attributes:
        retry_failed: also try what failed before.
        max_errors: stop after more errors than this; None never stops.
        item_seconds: longest time for one item; None is no limit.
        dry_run: only say what would be done.
        as_json: records in place of lines on standard output.
        quiet: nothing but results and errors.
        progress: how progress is shown.
    """

    retry_failed: bool = False
    max_errors: int | None = None
    item_seconds: float | None = None
    dry_run: bool = False
    as_json: bool = False
    quiet: bool = False
    progress: Literal["auto", "bar", "json", "none"] = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """Who captions.

    Attributes:
        model: a checkpoint, or the name that the endpoint knows.
        device: where the embedded engine runs.
        tensor_parallel: GPUs of this host that share its model.
        base_url: an OpenAI-compatible endpoint; None is the embedded engine.
        api_key: for the endpoint.
        concurrency: requests at once; None is 32 for the engine, 8 for an endpoint.
        retries: further attempts after a transient failure of the endpoint.
        min_confidence: captions of less say that the model is not sure; None is the checkpoint's.
    """

    model: str = "demo"
    device: Device = "auto"
    tensor_parallel: int = 1
    base_url: str | None = None
    api_key: str | None = None
    concurrency: int | None = None
    retries: int = 6
    min_confidence: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptionOptions:
    """Everything."""

    inputs: InputOptions
    prompts: Prompts
    outputs: OutputOptions
    run: RunOptions
    model: ModelOptions

    def settings(self) -> dict[str, Any]:
        """What captions depend on, for the journal."""
        prompts = self.prompts
        return {
            "model": self.model.model,
            "endpoint": self.model.base_url,
            "prompts": [asdict(prompt) for prompt in prompts.prompts],
            "draw": prompts.draw,
            "seed": prompts.seed,
            "around": [prompts.prefix, prompts.suffix, prompts.trigger],
            "sampling": {
                **asdict(prompts.sampling),
                "stop": list(prompts.sampling.stop),
                "stop_ids": [],
            },
            "pages": self.inputs.pages,
            **({} if prompts.schema is None else {"json_schema": prompts.schema.content}),
            "clip_seconds": self.inputs.clip_seconds,
            "min_confidence": self.model.min_confidence,
            "retry_failed": self.run.retry_failed,
        }
