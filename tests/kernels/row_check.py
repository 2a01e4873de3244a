"""What surrounds attention and experts on a GPU, against float64; started by ``test_row.py``.

Products of one row, RMSNorm, queries for latents. In the interpreter everything is float32, on a
device both widths are checked, launched and recorded. "small" leaves out most shapes, each of which
is compiled, and what is recorded. Usage: row_check.py DEVICE [small]
"""

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from k3vl.errors import ShapeError
from k3vl.kernels.argmax import argmax
from k3vl.kernels.argmax.gpu import argmax_gpu
from k3vl.kernels.choice import reference_kernels, triton_kernels
from k3vl.kernels.dependent import after_all, begins_early
from k3vl.kernels.gated_mlp import glu_linear
from k3vl.kernels.linear.gpu import (
    RowShape,
    front_gpu,
    glu_linear_gpu,
    linear_gpu,
    row_linear,
)
from k3vl.kernels.mla.alone import MLALayerAlone
from k3vl.kernels.mla.gpu import mla_absorb, mla_gate
from k3vl.kernels.mla.layer import MLALayerWeights
from k3vl.kernels.mla.reference import mla_absorb_reference
from k3vl.kernels.recording import GraphRunner
from k3vl.kernels.rms_norm.gpu import rms_norm as rms_norm_gpu
from k3vl.kernels.rms_norm.reference import rms_norm_reference
from k3vl.kernels.situ import SiluGLU, SituGLU

DEVICE = torch.device(sys.argv[1])
ON_GPU = DEVICE.type == "cuda"
DTYPES = (torch.float32, torch.bfloat16) if ON_GPU else (torch.float32,)
NAN = float("nan")
SMALL = "small" in sys.argv[2:]
SHAPES = ((7, 48), (23, 512), *(((1, 16), (8, 128), (40, 1536), (9, 3584)) * (not SMALL)))
SITU = SituGLU(beta=4.0, linear_beta=25.0)


def normal(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(shape, device=DEVICE) / shape[-1] ** 0.25).to(dtype)


def close(what: str, got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    assert got.isfinite().all(), f"{what}: not finite"
    error = float((got.double() - want).norm() / want.norm().clamp_min(1e-30))
    limit = 2e-5 if dtype == torch.float32 else 8e-3
    assert error < limit, f"{what}: {error:.2e} against {limit:.0e}"


def check_products(dtype: torch.dtype) -> None:
    for rows, d in SHAPES:
        what = f"{rows} x {d}"
        x = normal(1, 3 * d, dtype=dtype)[:, d : 2 * d]  # a part of a wider row
        w, base = normal(rows, d, dtype=dtype), normal(1, rows, dtype=dtype)
        want = x.double() @ w.double().mT
        close(what, linear_gpu(x, w), want, dtype)
        wide = linear_gpu(x, w, dtype=torch.float32)
        assert wide.dtype == torch.float32
        close(f"{what} unrounded", wide, want, torch.float32)
        onto = base.clone()
        assert linear_gpu(x, w, onto=onto) is onto
        close(f"{what} onto", onto, want + base.double(), dtype)
        for shape in (RowShape(16, 256, 1, stages=1), RowShape(4, 1024, 4, ahead=0)):
            out = torch.full_like(base, NAN)
            close(f"{what} {shape}", row_linear(x, w, out, shape=shape), want, dtype)
        for activation in (SITU, SiluGLU()):
            pair = normal(2 * rows, d, dtype=dtype)
            hidden = glu_linear(x.double(), pair.double(), activation)
            close(f"{what} {activation}", glu_linear_gpu(x, pair, activation), hidden, dtype)
        other = normal(rows + 5, d, dtype=dtype)
        logits, latent = front_gpu(x, other, w)
        assert (logits.dtype, latent.dtype) == (torch.float32, dtype)
        close(f"{what} latent", latent, want, dtype)
        close(f"{what} logits", logits, x.double() @ other.double().mT, torch.float32)


def check_enter(dtype: torch.dtype) -> None:
    """A token's queries, gate and cache row in one launch; one that pads writes nothing."""
    rank, latent, part, heads, width = 48, 20, 5, 3, 64
    splits = (rank, latent, part, heads * 8)
    w = MLALayerWeights(
        splits=splits, in_proj=normal(sum(splits), width, dtype=dtype),
        q_norm=normal(rank, dtype=dtype), q_b=normal(heads * (16 + part), rank, dtype=dtype),
        kv_norm=normal(latent, dtype=dtype), kv_b=normal(heads, 24, latent, dtype=dtype),
        o_proj=normal(width, heads * 8, dtype=dtype), scale=1.0, eps=1e-5,
    )  # fmt: skip
    x = normal(1, width, dtype=dtype)
    exact = reference_kernels("checks").mla
    wide = {n: getattr(w, n).double() for n in ("in_proj", "q_norm", "q_b", "kv_norm")}
    for row in (2, -1):
        where: Any = SimpleNamespace(cache_rows=torch.tensor([row], device=DEVICE))
        latents = torch.full((4, latent + part), 7.0, dtype=dtype, device=DEVICE)
        cache = latents.double()
        want = exact.enter(x.double(), replace(w, **wide), cache, where)
        got = MLALayerAlone.enter(triton_kernels("checks").mla, x, w, latents, where)
        for name, a, b in zip(("queries", "gate"), got, want, strict=True):
            assert a.shape == b.shape
            close(f"enter {name}", a, b, dtype)
        close("enter, cache", latents, cache, dtype)
        assert (latents[[0, 1, 3]] == 7).all()
        assert (latents[2] == 7).all() == (row < 0)


def check_argmax(_: torch.dtype) -> None:
    """The first of equal values, whatever their place; what is not a number is the largest."""
    for rows, width in ((1, 5), (3, 64), (2, 1000)):
        x = torch.randn(rows, width, device=DEVICE)
        into = torch.full((rows,), -1, device=DEVICE)
        assert argmax_gpu(x, into, block=64) is into
        assert torch.equal(into, argmax(x))
        x[:] = x.clamp(max=0.3)
        assert torch.equal(argmax_gpu(x, block=64), (x == x.amax(1, keepdim=True)).int().argmax(1))
        x[:] = float("-inf")
        assert (argmax_gpu(x, block=64) == 0).all()
        x[:, width - 2] = NAN
        assert (argmax_gpu(x, block=64) == width - 2).all()


def check_more_rows(dtype: torch.dtype) -> None:
    """Those are torch's products, with the same contract."""
    x, w, base = (normal(*shape, dtype=dtype) for shape in ((3, 48), (7, 48), (3, 7)))
    want = x.double() @ w.double().mT
    close("rows", linear_gpu(x, w), want, dtype)
    close("rows unrounded", linear_gpu(x, w, dtype=torch.float32), want, torch.float32)
    onto = base.clone()
    assert linear_gpu(x, w, onto=onto) is onto
    close("rows onto", onto, want + base.double(), dtype)
    try:
        linear_gpu(x, w, onto=base[:2])
    except ShapeError:
        return
    raise AssertionError("a result of another shape was accepted")


def check_norms(dtype: torch.dtype) -> None:
    for rows, d in ((1, 1536), (3, 7), (5, 512)):
        x, weight = normal(rows, d + 9, dtype=dtype)[:, 9:], normal(d, dtype=dtype)
        want = rms_norm_reference(x.double(), weight.double(), 1e-6)
        close(f"norm {rows} x {d}", rms_norm_gpu(x, weight, 1e-6), want, dtype)
        deep = rms_norm_gpu(x.unsqueeze(1), weight, 1e-6)
        assert deep.shape == (rows, 1, d)
        close("norm of three axes", deep.squeeze(1), want, dtype)


def check_absorb(dtype: torch.dtype) -> None:
    sizes = ((1, 3, 16, 5, 32), (17, 2, 32, 16, 256), (9, 4, 48, 16, 128), (2, 1, 8, 4, 16))
    for batch, heads, own, shared, latent in sizes:
        q = normal(batch, heads, own + shared, dtype=dtype)
        keys = normal(heads, own + 7, latent, dtype=dtype)[:, :own]
        want = mla_absorb_reference(q.double(), keys.double())
        close(f"absorb {batch}", mla_absorb(q, keys), want, dtype)


def check_gate(dtype: torch.dtype) -> None:
    for rows, width in ((1, 24), (5, 3000)):
        x, gate = normal(rows, width, dtype=dtype), normal(rows, 3 * width, dtype=dtype)
        gate = gate[:, width : 2 * width] * 9
        want = x.double() * gate.double().sigmoid()
        close(f"gate {rows} x {width}", mla_gate(x, gate), want, dtype)
    assert mla_gate(x, None) is x


def check_chains() -> None:
    """Launches that begin early find what those before them wrote; recorded, too."""
    sides = [normal(512, 512, dtype=torch.bfloat16) / 4 for _ in range(4)]
    x = normal(1, 512, dtype=torch.bfloat16)

    def chain() -> torch.Tensor:
        y = x
        for w in sides * 8:
            y = rms_norm_gpu(linear_gpu(y, w), sides[0][0], 1e-5)
        return y

    assert begins_early(x)
    with after_all():
        assert not begins_early(x)
        want = chain()
    for _ in range(50):
        assert torch.equal(chain(), want), "early launches: other numbers"
    again = GraphRunner().make(chain)
    for _ in range(50):
        assert torch.equal(again(), want), "early launches, recorded: other numbers"


CHECKS = (
    check_argmax, check_products, check_enter, check_more_rows, check_norms,
    check_absorb, check_gate,
)  # fmt: skip


def main() -> None:
    torch.manual_seed(1)
    for dtype in DTYPES:
        for check in CHECKS:
            check(dtype)
            sys.stdout.write(f"{check.__name__} {dtype}\n")
    if ON_GPU and not SMALL:
        check_chains()


if __name__ == "__main__":
    main()
