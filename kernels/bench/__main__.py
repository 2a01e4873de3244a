"""``python -m k3vl.kernels.bench OP``: check, then time, then say how near the device's limits.

Needs a CUDA device. A case whose result is wrong is not timed. A peer that fails costs nobody else
anything; one whose result is not ours is timed, and its line says so.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from k3vl.kernels.bench.about import append_lines, describe
from k3vl.kernels.bench.attention_cases import (
    attn_residual_cases,
    mla_around_cases,
    mla_decode_cases,
    mla_prefill_cases,
    small_vision_cases,
    vision_cases,
)
from k3vl.kernels.bench.case import Case, Peer, ratio_of_norms
from k3vl.kernels.bench.kda_cases import (
    decode_cases,
    prefill_cases,
    prefill_part_cases,
)
from k3vl.kernels.bench.linear_cases import row_cases
from k3vl.kernels.bench.moe_cases import (
    combine_cases,
    glu_cases,
    layer_cases,
    moe_cases,
    plan_cases,
    route_cases,
)
from k3vl.kernels.bench.parts import profile_call, table
from k3vl.kernels.bench.timing import Ceilings, measure_ceilings, time_call
from k3vl.kernels.bench.tower_cases import tower_cases

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CASES: dict[str, Callable[[], Iterator[Case]]] = {
    "kda_decode": decode_cases,
    "attn_residual": attn_residual_cases,
    "kda_prefill": prefill_cases,
    "kda_prefill_parts": prefill_part_cases,
    "mla_decode": mla_decode_cases,
    "mla_around": mla_around_cases,
    "mla_prefill": mla_prefill_cases,
    "vision_attention": vision_cases,
    "vision_small": small_vision_cases,
    "vision_tower": tower_cases,
    "row_linear": row_cases,
    "route": route_cases,
    "plan_experts": plan_cases,
    "combine": combine_cases,
    "situ_glu": glu_cases,
    "moe_experts": moe_cases,
    "latent_moe": layer_cases,
}

AGREE = 5e-2
"""Ratio of norms between a peer's result and ours: both round bfloat16, in places of their own."""


def main() -> None:
    """Measure some ops, or all."""
    parser = argparse.ArgumentParser(prog="python -m k3vl.kernels.bench", description=__doc__)
    parser.add_argument(
        "ops", nargs="+", choices=[*CASES, "all"], metavar="OP", help=", ".join(CASES)
    )
    parser.add_argument("--output", type=Path, help="append JSON lines here")
    parser.add_argument("--variants", action="store_true", help="also time other launch shapes")
    parser.add_argument("--profile", action="store_true", help="also say which kernels take it")
    parser.add_argument("--no-peers", action="store_true", help="time only our own")
    parser.add_argument("--only", default="", help="cases whose shape has this text")
    parser.add_argument("--commit", help="of the code, where there is no repository")
    parser.add_argument("--compile-only", action="store_true", help="run everything once, untimed")
    options = parser.parse_args()
    torch.manual_seed(time.time_ns() % 2**32)
    ceilings = None if options.compile_only else measure_ceilings()
    about = describe(torch.device("cuda"), ceilings, commit=options.commit)
    say(json.dumps(about))
    failed = 0
    for op in CASES if "all" in options.ops else options.ops:
        for case in CASES[op]():
            if options.only not in case.shape:
                continue
            # One case that fails must not cost the measurements of the others.
            try:
                lines = run(
                    case,
                    ceilings,
                    variants=options.variants,
                    peers=not options.no_peers,
                    profiles=options.profile,
                )
            except Exception:  # noqa: BLE001 - reported, and the exit status says so
                say(f"{case.op} {case.shape}: {traceback.format_exc(limit=6)}")
                failed += 1
                continue
            if options.output:
                append_lines(options.output, ({**about, **line} for line in lines))
            torch.cuda.empty_cache()
    sys.exit(bool(failed))


def run(
    case: Case,
    ceilings: Ceilings | None,
    *,
    variants: bool,
    peers: bool,
    profiles: bool = False,
) -> list[dict[str, Any]]:
    """Check one case and time everybody in it; ``profiles`` are printed, not returned."""
    got = case.ours()
    want = case.want() if case.want and ceilings else None
    error = None if want is None else ratio_of_norms(got, want)
    if error is not None and not error < case.limit:
        raise AssertionError(f"wrong by {error:.2e}, allowed {case.limit:.0e}")
    say(f"{case.op} {case.shape}: " + ("not compared" if error is None else f"error {error:.1e}"))
    everybody: dict[str, Callable[[], object] | Peer] = {"k3vl": case.timed or case.ours}
    if variants:
        # Where the reference is too much work, they are compared with ours.
        against = got if want is None else want
        for name, variant in case.variants.items():
            trusted = not ceilings or not case.compared
            if isinstance(variant, Peer) or trusted or _agrees(case, name, variant, against):
                everybody[f"k3vl, {name}"] = variant
    if peers:
        everybody.update(case.peers)
    lines = []
    for name, work in everybody.items():
        try:
            line = _turn(case, name, work, got, ceilings, profiles=profiles)
        except Exception:  # noqa: BLE001 - a peer or a variant that does not run here
            say(f"  {name}: {traceback.format_exc(limit=-3)}")
            continue
        if line:
            lines.append({**line, "error": error if name == "k3vl" else None})
    return lines


@torch.no_grad()
def _turn(
    case: Case,
    name: str,
    work: Callable[[], object] | Peer,
    got: torch.Tensor,
    ceilings: Ceilings | None,
    *,
    profiles: bool,
) -> dict[str, Any]:
    """Time one of a case's implementations; of a prepared peer also compare the result with ours.

    Of its line, ``apart`` is the ratio of norms and ``agrees`` whether that is small; both None
    where nothing was compared.
    """
    if not isinstance(work, Peer):
        return _measure(case, name, work, ceilings, profiles=profiles)
    prepared = work.prepare()
    apart = ratio_of_norms(prepared.result(), got) if prepared.result else None
    agrees = None if apart is None else apart < AGREE  # NaN is not
    if agrees is False:
        say(f"  WARNING: what follows is {apart:.1e} from ours, no comparison: {name}")
    line = _measure(case, name, prepared.timed, ceilings, profiles=profiles)
    if apart is not None and not math.isfinite(apart):
        apart = None  # JSON has no NaN
    return {**line, "apart": apart, "agrees": agrees} if line else {}


def _agrees(case: Case, name: str, work: Callable[[], object], against: torch.Tensor) -> bool:
    """Whether a variant runs, and its result is ``against``; says so if not."""
    try:
        got = work()
    except Exception:  # noqa: BLE001 - the others can still be timed
        say(f"  {name}: {traceback.format_exc(limit=-3)}")
        return False
    assert isinstance(got, torch.Tensor)
    error = ratio_of_norms(got, against)
    if not error < case.limit:
        say(f"  {name}: wrong by {error:.2e}, allowed {case.limit:.0e}; not timed")
    return error < case.limit


def _measure(
    case: Case,
    name: str,
    work: Callable[[], object],
    ceilings: Ceilings | None,
    *,
    profiles: bool,
) -> dict[str, Any]:
    if ceilings is None:
        work()
        torch.cuda.synchronize()
        return {}
    timing = time_call(work)
    seconds = timing.median * 1e-6
    floor = max(case.bytes / ceilings.bandwidth, case.flops / ceilings.flops)
    line = {
        "op": case.op,
        "shape": case.shape,
        "implementation": name,
        "median_us": round(timing.median, 2),
        "quartiles_us": [round(timing.low, 2), round(timing.high, 2)],
        "count": timing.count,
        "cold_by": "reading",
        "bytes": case.bytes,
        "flops": case.flops,
        "of_bandwidth": round(case.bytes / seconds / ceilings.bandwidth, 3),
        "of_flops": round(case.flops / seconds / ceilings.flops, 3),
        "of_limit": round(floor / seconds, 3),
    }
    say(
        f"  {timing.median:10.1f} us  {line['of_limit']:6.1%} of the limit  "
        f"({timing.low:.1f}..{timing.high:.1f})  {name}"
    )
    if profiles:
        for text in table(profile_call(work)):
            say(text)
    return line


def say(text: str) -> None:
    """To standard output at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
