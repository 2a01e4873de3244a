"""What attention layers ask of a pass: which rows belong to which sequence, and what each sees."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class Sequences(Protocol):
    """N rows of B sequences, of which the first ``num_decodes`` have one row each.

    Attributes:
        num_decodes: sequences of exactly one row, at the front.
        prefill_lens: rows of every other sequence, its padding among them.
        cu_seqlens: [P + 1] int64, where the rows of the P other sequences begin and end, counted
            from the first of them.
        ends: [P] int64, the row behind the last token of each; padding follows.
        cache_rows: [N] int64, where each row's latent is written.
        decode_rows: [num_decodes, L] int64, where the pages of ``page`` latents begin that each of
            these sequences sees, and decode_lens: [num_decodes] int64, how many latents that are.
        prefill_rows: per other sequence [L_i] int64, all latents it sees; one tensor for all of
            them together where there is ``prefill_keys``.
        prefill_keys: [P + 1] int64, where each one's begin and end in that tensor; what is behind
            the last is not read. Then the lengths are known on the device only: there is one in
            ``prefill_lens`` for all. None otherwise.
    """

    @property
    def num_decodes(self) -> int: ...  # noqa: D102 - see above, as all of them
    @property
    def prefill_lens(self) -> tuple[int, ...]: ...  # noqa: D102
    @property
    def cu_seqlens(self) -> torch.Tensor: ...  # noqa: D102
    @property
    def ends(self) -> torch.Tensor: ...  # noqa: D102
    @property
    def cache_rows(self) -> torch.Tensor: ...  # noqa: D102
    @property
    def decode_rows(self) -> torch.Tensor: ...  # noqa: D102
    @property
    def decode_lens(self) -> torch.Tensor: ...  # noqa: D102
    @property
    def page(self) -> int: ...  # noqa: D102
    @property
    def prefill_rows(self) -> tuple[torch.Tensor, ...]: ...  # noqa: D102
    @property
    def prefill_keys(self) -> torch.Tensor | None: ...  # noqa: D102
