"""The Gluon kernel of MLA decode, on a CPU: all that is asynchronous comes as late as it may."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from k3vl.kernels.mla.reference import mla_decode_reference

HEADS, LATENT, SHARED, PAGE = 70, 512, 64, 64
BF16 = torch.bfloat16


@pytest.mark.parametrize("splits", [1, 2, 3, 5])
def test_kernel_is_its_reference(splits: int) -> None:
    """Odd lengths, padding, pages apart in any order; NaN in all that is not used."""
    pytest.importorskip("triton.experimental.gluon")
    from k3vl.kernels.mla.hopper import HopperShape, hopper_parts, hopper_takes
    from tests.kernels.gluon_on_cpu import Descriptor, launch

    shape = HopperShape(splits)
    torch.manual_seed(splits)
    random.seed(splits)
    lengths = torch.tensor([1, 0, 64, 65, 3 * PAGE - 1, 129, 256])
    batch, most = len(lengths), 4
    latents = torch.randn(batch * most * (PAGE + 7), LATENT + SHARED).bfloat16()
    begins = torch.randperm(batch * most).view(batch, most) * (PAGE + 7)
    unused = torch.ones(len(latents), dtype=torch.bool)
    for b, length in enumerate(lengths.tolist()):
        for t in range(length):
            unused[begins[b, t // PAGE] + t % PAGE] = False
    latents[unused] = float("nan")
    clean = begins.clone()
    begins[1] = 2**62  # a padding row's table is never read
    begins = begins.T.contiguous().T
    q = torch.randn(batch, HEADS, LATENT + SHARED).bfloat16()
    parts = torch.full((batch, splits, HEADS, LATENT), float("nan"), dtype=BF16)
    weights = torch.full((batch, HEADS, splits), float("nan"))

    def on_cpu(kernel, grid, described, *args, **constants) -> None:
        blocks = (Descriptor(matrix, tuple(block)) for matrix, block in described)
        launch(kernel, grid, *blocks, *args, ordered=True, **constants)

    assert hopper_takes(q, latents, begins, LATENT, PAGE)
    hopper_parts(
        q, latents, begins, lengths, LATENT, 0.05, PAGE, shape, results=(parts, weights),
        early=True, launch=on_cpu,
    )  # fmt: skip
    out = parts[:, 0]
    if splits > 1:
        assert not parts[weights.mT.isneginf()].any(), "an empty part is zeros"
        share = weights.mul(0.6931471805599453).softmax(-1).nan_to_num()
        out = (share.mT.unsqueeze(-1) * parts.float()).sum(1)
    clean_latents = latents.double().nan_to_num()
    want = mla_decode_reference(q.double(), clean_latents, clean, lengths, LATENT, 0.05, PAGE)
    assert not out[1].any(), "padding gets zeros"
    for b in range(batch):
        assert (out[b] - want[b]).norm() <= 4e-3 * want[b].norm(), lengths[b]


# What orders the kernel's accesses: a line to leave out, found by its function and the text before.
ORDER = [
    ("zero_rows", "piece.load(LAYOUT), 0.0)\n", "meet()"),
    ("zero_rows", "piece.store(kept)\n", "fence_async_shared()"),
    ("zero_rows", "piece.store(kept)\n    fence_async_shared()\n", "meet()"),
    ("begin_scores", "\n", "mbarrier.wait(landed.index(2 * SIDE * PIECES + k), phase)"),
    ("begin_scores", "\n", "mbarrier.wait(landed.index((3 - 2 * SIDE) * PIECES + k), phase)"),
    ("end_mixtures", "\n", "meet()"),
    ("end_side", "\n", "meet()"),
    ("end_side", "\n", "mbarrier.wait(told.index(4 - SIDE), 0)"),
    ("one_side", "\n", "mbarrier.wait(landed.index(4 * PIECES), 0)"),
    ("one_side", "m_max.index(0).store(higher)\n", "meet()"),
    ("one_side", "        else:\n", "mbarrier.wait(told.index(0), phase)"),
    ("one_side", "probabilities replace.\n", "meet()"),
    ("one_side", "m_p.index(own).store(b_p)\n", "fence_async_shared()"),
    ("one_side", "m_p.index(own).store(b_p)\n            fence_async_shared()\n", "meet()"),
    ("one_side", "        if SIDE == 0:\n", "mbarrier.wait(told.index(1), phase)"),
    ("one_side", "[:, None]).to(gl.bfloat16))\n", "fence_async_shared()"),
    ("one_side", "[:, None]).to(gl.bfloat16))\n            fence_async_shared()\n", "meet()"),
    ("one_side", "        else:\n", "mbarrier.wait(told.index(2), phase)"),
    ("one_side", "\n", "mbarrier.wait(landed.index(LAST + k), phase)"),
]


@pytest.mark.parametrize(("function", "before", "left_out"), ORDER)
def test_whatever_is_left_out_of_the_order_is_a_race(
    tmp_path: Path, function: str, before: str, left_out: str
) -> None:
    """Three rounds over 300 latents: also what one of them does to the next is ordered."""
    pytest.importorskip("triton.experimental.gluon")
    from k3vl.kernels.mla import hopper_kernels
    from k3vl.kernels.mla.hopper import HopperShape, hopper_parts
    from tests.kernels.gluon_on_cpu import Descriptor, launch
    from tests.kernels.ordering import RaceError, module_of, without

    text = Path(hopper_kernels.__file__).read_text(encoding="utf-8")
    start = text.index(f"def {function}(")
    end = text.index("@gluon.jit", start)
    text = text[:start] + without(text[start:end], before, left_out) + text[end:]
    changed = module_of(text, tmp_path)

    def on_cpu(_, grid, described, *args, **constants) -> None:
        blocks = (Descriptor(matrix, tuple(block)) for matrix, block in described)
        kernel = changed.mla_decode_sides_kernel
        launch(kernel, grid, *blocks, *args, ordered=True, **constants)

    q, latents = torch.zeros(1, 64, 576).bfloat16(), torch.zeros(320, 576).bfloat16()
    results = torch.zeros(1, 1, 64, 512).bfloat16(), torch.zeros(1, 64, 1)
    with pytest.raises(RaceError):
        hopper_parts(
            q, latents, torch.arange(0, 320, 64)[None], torch.tensor([300]), 512, 0.05, 64,
            HopperShape(1), results=results, launch=on_cpu,
        )  # fmt: skip


def test_what_the_kernel_does_not_take() -> None:
    pytest.importorskip("triton.experimental.gluon")
    from k3vl.kernels.mla.hopper import hopper_takes

    q, rows = torch.zeros(1, 3, 576, dtype=torch.bfloat16), torch.zeros(1, 2, dtype=torch.int64)
    latents = torch.zeros(200, 580, dtype=torch.bfloat16)
    assert hopper_takes(q, latents[:, :576].contiguous(), rows, 512, 128)
    assert not hopper_takes(q, latents[:, :576], rows, 512, 64), "rows of 1160 bytes"
    assert not hopper_takes(q, latents[:, 4:].contiguous(), rows, 512, 48), "a tile over two pages"
    wide = torch.zeros(1, 3, 580, dtype=torch.bfloat16)
    assert not hopper_takes(wide[..., :576], latents[:, :576].contiguous(), rows, 512, 64)
    assert not hopper_takes(q.float(), latents[:, :576].contiguous().float(), rows, 512, 64)
    assert not hopper_takes(q, latents[:, :576].contiguous(), rows.int(), 512, 64)


def test_which_kernel_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts by the table's width; the Triton kernel for all that the other is not for."""
    pytest.importorskip("triton")
    from k3vl.kernels.mla import gpu
    from k3vl.kernels.mla.hopper import HopperShape
    from k3vl.kernels.mla.turned import TurnedShape

    def chosen(
        batch: int, context: int, *, heads: int = 96, page: int = 64, dtype: torch.dtype = BF16
    ) -> object:
        q = torch.zeros(batch, heads, 576, dtype=dtype)
        latents, table = q[:, 0], torch.zeros(batch, context // page, dtype=torch.int64)
        return gpu._best_shape(q, latents, table, 512, page)

    assert isinstance(chosen(1, 8192), gpu.DecodeShape), "no device"
    monkeypatch.setattr(gpu, "hopper_runs", lambda _: True)
    assert chosen(1, 64) == HopperShape(1)
    assert chosen(1, 8192) == HopperShape(32)
    assert chosen(1, 32768) == HopperShape(64)
    assert chosen(2, 32768) == HopperShape(32)
    assert chosen(3, 8192) == HopperShape(22)
    assert chosen(16, 8192) == HopperShape(4)
    assert chosen(26, 8192) == HopperShape(2)
    assert chosen(32, 8192) == TurnedShape(4)
    assert chosen(32, 2048) == HopperShape(2)
    assert chosen(27, 8192) == TurnedShape(4)
    assert chosen(32, 8192, heads=48) == HopperShape(4)
    assert chosen(32, 8192, heads=49) == TurnedShape(4)
    assert chosen(32, 8192, heads=97) == HopperShape(2)
    assert chosen(128, 8192) == TurnedShape(1)
    assert chosen(132, 1024) == TurnedShape(1)
    assert chosen(132, 960) == HopperShape(1)
    assert chosen(133, 8192) == HopperShape(1)
    for shape in (
        chosen(1, 8192, heads=12),
        chosen(1, 8160, page=48),
        chosen(1, 8192, dtype=torch.float32),
    ):
        assert isinstance(shape, gpu.DecodeShape)


@pytest.mark.parametrize(
    ("capability", "runs"), [((9, 0), True), ((10, 0), False), ((8, 0), False)]
)
def test_where_the_kernel_runs(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], *, runs: bool
) -> None:
    pytest.importorskip("triton")
    from k3vl.kernels import hopper

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    ask = hopper.hopper_runs.__wrapped__
    assert ask(torch.device("cuda", 0)) is runs
    assert not ask(torch.device("cpu"))
    monkeypatch.setattr(hopper.triton.knobs.runtime, "interpret", True)
    assert not ask(torch.device("cuda", 0)), "Gluon has no interpreter"


def test_decode_needs_no_gluon() -> None:
    """A Triton without it, or with another of it, still has the Triton kernel."""
    pytest.importorskip("triton")
    code = (
        "import sys; sys.modules['triton.experimental.gluon'] = None\n"
        "import k3vl.kernels.mla.gpu as gpu\n"
        "assert 'k3vl.kernels.mla.hopper_kernels' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
