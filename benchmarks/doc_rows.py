"""The cases that the documents' tables show, and what was wanted of them."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.measured import Row

_THEN, _LATER = "6c1f8ef", "cbb41db"
"""Runs in which defaults of today were variants."""


def _prefill(
    label: str,
    shape: str,
    goal: float,
    share: float | None = None,
) -> Row:
    return Row(
        label=f"KDA prefill {label}",
        op="kda_prefill",
        shape=shape,
        against="fla",
        goal=goal,
        share=share,
    )


def _mla(label: str, goal: float | None = None) -> Row:
    return Row(
        label=f"MLA decode {label}",
        op="mla_decode",
        shape=f"{label} ",
        against="FlashMLA",
        goal=goal,
    )


def _residual(tokens: int, goal: float | None, share: float | None = None) -> Row:
    return Row(
        label=f"AttnRes and norm T{tokens}",
        op="attn_residual",
        shape=f"T{tokens} ",
        goal=goal,
        share=share,
    )


_FLASH = "k3vl, HopperFlash(programs={}, turns=False)"

KERNELS = (
    _prefill("T8192 H96", "1 x T8192 H96", 4.0, 0.26),
    _prefill("T8192 H12", "1 x T8192 H12", 2.0),
    _prefill("64 x T128 H96", "64 x T128 H96", 2.0),
    Row(
        label="KDA decode B32 H96",
        op="kda_decode",
        shape="B32 H96",
        goal=1.25,
        share=0.9,
    ),
    Row(label="KDA decode B128 H96", op="kda_decode", shape="B128 H96"),
    _mla("B1 L8192"),
    _mla("B1 L32768", 1.5),
    _mla("B32 L8192", 1.0),
    _mla("B128 L8192"),
    Row(label="value product of MLA decode B32", op="mla_values", shape="B32 ", against="PyTorch"),
    Row(
        label="MLA prefill T8192",
        op="mla_prefill",
        shape="T8192 L8192 ",
        against="SGLang's Triton",
    ),
    Row(
        label="MLA prefill T32768",
        op="mla_prefill",
        shape="T32768 L32768 ",
        against="SGLang's Triton",
        goal=4.0,
    ),
    Row(
        label="MLA prefill T8192 behind 24,576 (SGLang expands nothing)",
        op="mla_prefill",
        shape="T8192 L32768 ",
        against="SGLang's Triton over latents",
    ),
    *(_residual(tokens, 2.5) for tokens in (1, 8, 32)),
    _residual(8192, None, 0.75),
    Row(
        label="attention of the tower, 5,476 patches",
        op="vision_attention",
        shape="1 x 5476 ",
        against="PyTorch",
        instead={_LATER: _FLASH.format(132)},
    ),
    Row(
        label="tower and projector 1024x1024",
        op="vision_tower",
        shape="1024x1024",
        goal=1.2,
        share=0.6,
    ),
    Row(
        label="tower and projector, 16 of 448x448",
        op="vision_tower",
        shape="16 of 448x448",
    ),
)

_NARROW = "128x256 w4 s3 and 128x256 w4 s3"
_WIDE = "128x128 w8 s3 and 128x128 w8 s3"


def _experts(tokens: int, goal: float | None = None, share: float | None = None) -> Row:
    return Row(
        label=f"{tokens:,}" + (" token" if tokens == 1 else " tokens"),
        op="moe_experts_mxfp4",
        shape=f"T{tokens}, ",
        against="Marlin",
        goal=goal,
        share=share,
    )


EXPERTS = (
    _experts(1, 1.5),
    _experts(8, 1.3),
    _experts(32),
    _experts(128, 1.3),
    *(_experts(tokens) for tokens in (512, 2048, 4096)),
    _experts(8192, 2.0, 0.55),
    _experts(16384),
)


@dataclass(frozen=True, slots=True)
class Choice:
    """A shape at which two ways were timed in one run, at ``commit``."""

    label: str
    op: str
    shape: str
    one: str
    eight_taken: bool
    eight: str = "k3vl"
    commit: str = _THEN


def _choice(tokens: int, joined: str) -> Choice:
    one = f"k3vl, joined, {joined}"
    return Choice(f"{tokens:,}", "moe_experts_mxfp4", f"T{tokens}, ", one, tokens < 280)


EIGHT_OR_ONE = (
    *(_choice(tokens, _NARROW) for tokens in (512, 2048)),
    *(_choice(tokens, _WIDE) for tokens in (8192, 16384)),
)


def _slice(
    what: str, label: str, shape: str, goal: float | None = None, **more: float | str
) -> Row:
    return Row(
        label=label,
        op=f"slice_{what}",
        shape=f"5 layers of K3, 896 experts, {shape}",
        goal=goal,
        **more,  # type: ignore[arg-type]
    )


SLICE_ROWS = (
    _slice("prefill", "prefill 1,024", "T1024"),
    _slice("prefill", "prefill 4,096", "T4096", 1.7),
    _slice("prefill", "prefill 16,384", "T16384"),
    _slice("prefill", "prefill 32,768", "T32768", 4.0),
    _slice("decode", "decode, 1 request at 512", "B1 L512", 1.1, share=0.9),
    _slice("decode", "decode, 32 at 512", "B32 L512", 1.2),
)
