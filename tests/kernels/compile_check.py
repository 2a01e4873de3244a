"""Every kernel compiled for compute capability 9.0 by the Triton that is there; needs no device.

Compiled is what models launch, recorded on "meta" (``device_only``): K3's own layers at their own
widths in decode steps, prompts and the tower, whole and as one of eight ranks has them, and the
demo, whose experts have no 4 bits. Launches that differ in numbers only are one. Started by
``test_compiles.py`` in its own process, it compiles in as many as there are processors.

Besides what does not compile it finds a kernel that none of this launches, products for which the
assembler waits one by one, and joined products with other shared memory than their launches count
on: so much would weights take that get another layout by way of it. Registers that the assembler
keeps in memory are printed, as they differ from Triton to Triton; where few have made much, many
are a fault.
"""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import re
import sys
import tempfile
from contextlib import redirect_stdout
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from benchmarks.sanitize import all_kernels
from k3vl.config import TextConfig, parse_config
from k3vl.demo.pack import CHECKPOINT
from k3vl.kernels.bench.tower_cases import build
from k3vl.kernels.choice import triton_kernels
from k3vl.kernels.moe.joined import shared_bytes
from k3vl.lm.batch import Row, build_batch
from k3vl.lm.cache import HybridCache, plan_cache
from k3vl.lm.decode_inputs import StepInputs
from k3vl.lm.model import K3Model
from k3vl.lm.ranks import part_of
from k3vl.synthetic import slice_config
from tests.device_only import META, Launch, recorded

DTYPE, KERNELS = torch.bfloat16, triton_kernels("a check")
K3 = parse_config(slice_config(2))
"""Two layers: KDA and a dense MLP, MLA and experts."""
SPILLED = re.compile(r"\b([1-9]\d*) bytes spill stores")
MOST_SPILLED = {"kda_prepare_hopper_kernel": 100, "kda_walk_sides_kernel": 100}
"""Bytes of a thread; what they had before, 130 and 730, were 9 to 25 % of their time."""
SERIAL = re.compile(r".*wgmma.*serialized.*")
LAUNCHES: list[Launch] = []
"""What is compiled, for the processes that do it: they are forked."""


class NoDevice:
    """What Triton asks its driver before it compiles."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def on_hopper() -> None:
    """Have launches go as on the device that is compiled for."""
    for name, module in sys.modules.items():
        if name.startswith("k3vl.kernels.") and hasattr(module, "hopper_runs"):
            module.hopper_runs = lambda _: True
    properties = SimpleNamespace(multi_processor_count=132)
    torch.cuda.get_device_properties = lambda _: properties
    triton.runtime.driver.set_active(NoDevice())


class Language:
    """A language model without weights, and its cache."""

    def __init__(self, config: TextConfig, **forms: Any) -> None:
        self.model = K3Model(config, KERNELS, dtype=DTYPE, device=META, **forms)
        self.model.requires_grad_(False)
        sizes = plan_cache(config, DTYPE, budget_bytes=1 << 32, page_size=64)
        self.cache = HybridCache(config, sizes, dtype=DTYPE, device=META)

    def decode(self, rows: int) -> None:
        batch = StepInputs(self.model, self.cache, rows).batch()
        KERNELS.argmax(self.model(batch, self.cache), None)

    def prompt(self, tokens: int, behind: int = 0) -> None:
        sizes = self.cache.sizes
        row = Row(
            token_ids=[0] * tokens,
            context_len=behind,
            slot=[0] * sizes.units_per_slot,
            pages=[0] * sizes.pages(behind + tokens),
        )
        self.model(build_batch([row], self.cache), self.cache)


def launch_all() -> None:
    """What launches every kernel, in all forms that differ much."""
    form = {"experts": "mxfp4", "router": DTYPE}
    whole = Language(K3.text, **form)
    an_eighth = Language(part_of(K3.text, 8, "mxfp4"), **form)
    demo = Language(parse_config(json.loads((CHECKPOINT / "config.json").read_text())).text)
    one_layer = replace(K3.vision, vt_num_hidden_layers=1)
    tower, _ = build(one_layer, KERNELS.vision, DTYPE, str(META))
    patches = torch.empty(320, 3, 14, 14, dtype=torch.uint8, device=META)
    with torch.inference_mode():
        tower(patches, [(1, 16, 16), (1, 8, 8)])
        for rows in (1, 32, 128, 256):
            whole.decode(rows)
        whole.prompt(8192)
        whole.prompt(1000)
        whole.prompt(40, behind=24576)
        an_eighth.decode(32)
        an_eighth.prompt(8192)
        demo.decode(8)
        demo.prompt(300)


def distinct(launches: list[Launch]) -> list[Launch]:
    """The first of those that differ in numbers only."""
    found: dict[str, Launch] = {}
    for launch in launches:
        kinds = [str(getattr(x, "dtype", type(x))) for x in launch.args]
        found.setdefault(f"{launch.kernel} {kinds} {sorted(launch.options.items())}", launch)
    return list(found.values())


def compiled(number: int) -> tuple[int, str, str]:
    """One of LAUNCHES, the assembler's words, and what is wrong, or nothing."""
    launch, log = LAUNCHES[number], io.StringIO()
    try:
        with redirect_stdout(log):
            made = launch.function.warmup(*launch.args, grid=launch.grid, **launch.options)
    except (triton.TritonError, RuntimeError) as error:  # the latter from the compiler's passes
        return number, "", f"{error}\n{error.__cause__ or ''}"[-800:]
    said = log.getvalue()
    assert "registers" in said, "the assembler's words are not printed any more"
    if serial := SERIAL.search(said):
        return number, said, serial[0]
    counted = shared(launch)
    if counted not in (None, made.metadata.shared):
        return number, said, f"{made.metadata.shared} bytes of shared memory, not {counted}"
    return number, said, ""


def shared(launch: Launch) -> int | None:
    """Bytes that a launch of joined products counts on; None for all others."""
    if not launch.kernel.endswith("_joined_kernel"):
        return None
    given = launch.options
    rows = given["BM"] * (2 if launch.kernel.startswith("gate_up") else 1)
    width = given["BN"] + given["TAIL"]
    return shared_bytes(rows, given["num_warps"], given["num_stages"], width)


def compile_all(folder: str) -> list[str]:
    """What is wrong with LAUNCHES; Triton keeps what it makes in a folder."""
    triton.knobs.cache.dir = folder
    triton.knobs.nvidia.dump_ptxas_log = True
    faults = []
    with multiprocessing.get_context("fork").Pool(len(os.sched_getaffinity(0))) as pool:
        for number, said, fault in pool.imap_unordered(compiled, range(len(LAUNCHES))):
            name = f"{LAUNCHES[number].kernel} {LAUNCHES[number].options}"
            if spilled := SPILLED.search(said):
                sys.stdout.write(f"{spilled[0]}: {name}\n")
                if int(spilled[1]) > MOST_SPILLED.get(LAUNCHES[number].kernel, 1 << 20):
                    faults.append(f"{name}: {spilled[0]}")
            if fault:
                faults.append(f"{name}: {fault}")
    return faults


def main() -> None:
    on_hopper()
    with recorded() as launches:
        launch_all()
    LAUNCHES.extend(distinct(launches))
    with tempfile.TemporaryDirectory() as folder:
        faults = compile_all(folder)
    missing = set(all_kernels()) - {launch.kernel for launch in LAUNCHES}
    faults += [f"{name}: nothing here launches it" for name in sorted(missing)]
    if faults:
        sys.exit("\n".join(faults))
    sys.stdout.write(f"{len(LAUNCHES)} launches compiled by Triton {triton.__version__}\n")


if __name__ == "__main__":
    main()
