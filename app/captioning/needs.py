"""Whether a caption is still to be made: one rule, for the run and for the dry run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from k3vl.app.captioning.items import Item, make_key
from k3vl.app.captioning.sidecars import Sidecars, existing

if TYPE_CHECKING:
    from k3vl.app.captioning.journal import Journal
    from k3vl.app.captioning.prompts import Prompt
    from k3vl.app.captioning.sidecars import Policy

State = Literal["needed", "captioned", "exists", "failed"]
"""To be made; made before; a sidecar that nobody knows is there; failed before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What decides.

    Attributes:
        journal: what was done before; None knows nothing.
        sidecars: where captions may lie that the journal does not know.
        policy: what is done with captions that exist.
        retry_failed: failures are tried again, and captions that exist are left alone.
    """

    journal: Journal | None
    sidecars: Sidecars
    policy: Policy
    retry_failed: bool

    def state(self, item: Item, prompt: Prompt) -> State:
        """What is to be done about one caption."""
        journal, key = self.journal, make_key(item.id, prompt.id)
        keep = self.policy == "skip" or self.retry_failed
        if journal is not None:
            if journal.is_captioned(key) and (keep or journal.in_this_run(key)):
                return "captioned"
            if journal.has_failed(key):
                again = self.retry_failed or self.policy != "skip"
                return "needed" if again and not journal.in_this_run(key) else "failed"
        if self.policy == "skip" and existing(self.sidecars.paths(item, prompt.id)):
            return "exists"
        return "needed"
