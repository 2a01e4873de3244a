"""The expert kernels against float64; started by ``test_moe.py`` in its own process.

Triton decides between compiler and interpreter when it is imported. "small" leaves out what
is large, or recorded. Usage: moe_check.py DEVICE [small]
"""

import sys
from dataclasses import replace
from functools import partial

import torch
import triton
import triton.language as tl

from k3vl.kernels.choice import reference_kernels, triton_kernels
from k3vl.kernels.hopper import hopper_runs
from k3vl.kernels.moe import gpu, moe_experts, route, router_logits
from k3vl.kernels.moe.alone import takes_alone
from k3vl.kernels.moe.experts import FloatExperts
from k3vl.kernels.moe.experts_kernel import decoded_weights
from k3vl.kernels.moe.few import SHAPES as FEW
from k3vl.kernels.moe.few import can_take
from k3vl.kernels.moe.gpu import (
    SORTED_TOKENS,
    combine,
    moe_experts_gpu,
    moe_experts_mxfp4_gpu,
    plan_gpu,
    plan_many_gpu,
    products_of_many,
    route_gpu,
    router_logits_gpu,
)
from k3vl.kernels.moe.joined import SHAPES, can_join, joined_products
from k3vl.kernels.moe.joined_kernel import byte_choices, decoded_step
from k3vl.kernels.moe.latent import MoEWeights
from k3vl.kernels.moe.mxfp4 import LARGEST_SCALE, Mxfp4Experts, prepare_experts
from k3vl.kernels.moe.plan import EIGHT, FINE_WIDTHS, ExpertPlan, plan_experts
from k3vl.kernels.moe.separate import separate_products
from k3vl.kernels.recording import GraphRunner
from k3vl.kernels.rms_norm import rms_norm
from k3vl.kernels.situ import GatedActivation, SiluGLU, SituGLU
from k3vl.kernels.situ.gpu import glu_gpu
from tests.kernels.ptx_lanes_on_cpu import interpret_machine_code

DEVICE = torch.device(sys.argv[2])
ON_GPU = DEVICE.type == "cuda"
DTYPE = torch.bfloat16 if ON_GPU else torch.float32  # the interpreter's bfloat16 is not ours
LIMIT = 8e-3 if ON_GPU else 5e-5  # the reference has its activation in float32, too
SITU = SituGLU(beta=4.0, linear_beta=25.0)

OTHER = {  # blocks with as many threads as rows, or more
    width: replace(shape, rows=64) for width, shape in SHAPES.items()
}


def stored(experts: int, latent: int, inner: int) -> Mxfp4Experts:
    def codes(*shape: int) -> torch.Tensor:
        return torch.randint(0, 256, shape, dtype=torch.uint8, device=DEVICE)

    def scales(*shape: int) -> torch.Tensor:
        return torch.randint(116, 124, shape, dtype=torch.uint8, device=DEVICE)

    return prepare_experts(
        codes(experts, 2 * inner, latent // 2),
        scales(experts, 2 * inner, latent // 32),
        codes(experts, latent, inner // 2),
        scales(experts, latent, inner // 32),
    )


def routing(tokens: int, experts: int, top_k: int, hot: bool) -> tuple[torch.Tensor, torch.Tensor]:
    logits = torch.randn(tokens, experts, device=DEVICE)
    if hot:
        logits[:, 0] += 20  # one expert has every token, others have none
    bias = torch.randn(experts, device=DEVICE) * 0.1
    got = route_gpu(logits, bias, top_k, renormalise=True, scale=2.0)
    want = route(logits, bias, top_k, renormalise=True, scale=2.0)
    assert torch.equal(got[1].sort(1).values, want[1].sort(1).values), "route: other experts"
    by_expert = [w.gather(1, e.argsort(1)) for w, e in (got, want)]
    torch.testing.assert_close(*by_expert, rtol=1e-5, atol=1e-6)
    return got


def check_plan(experts: torch.Tensor, count: int) -> None:
    for narrow in (16, EIGHT):
        want = plan_experts(experts, count, narrow)
        check_plan_is(plan_gpu(experts, count, narrow), want)
    want = plan_experts(experts, count, widths=FINE_WIDTHS)
    check_plan_is(plan_many_gpu(experts, count), want)


def check_plan_is(got: ExpertPlan, want: ExpertPlan) -> None:
    assert torch.equal(got.order, want.order), "plan: order"
    assert set(got.tiles) == set(want.tiles)
    for width, tiles in want.tiles.items():
        n, own = int(tiles.count), got.tiles[width]
        assert int(own.count) == n, f"plan: {width} count"
        for name in ("expert", "first", "end"):
            a, b = getattr(own, name)[:n], getattr(tiles, name)[:n]
            assert torch.equal(a, b), f"plan: {width} {name}"


def close(what: str, got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.isfinite().all(), f"{what}: not finite"
    error = float((got.double() - want.double()).norm() / want.double().norm())
    assert error < LIMIT, f"{what}: {error:.2e}"


def check_experts(
    tokens: int, shape: tuple[int, int, int], top_k: int, hot: bool, activation: GatedActivation
) -> None:
    experts, latent, inner = shape
    what = f"N {tokens}, E, L, I {shape}, k {top_k}, hot {hot}"
    # Tokens lie between rows of NaN; a kernel that reads past its own shows it.
    room = torch.full((tokens + 2, latent), float("nan"), device=DEVICE, dtype=DTYPE)
    room[1:-1] = torch.randn(tokens, latent, device=DEVICE).to(DTYPE) * 0.1
    x = room[1:-1]
    weights, chosen = routing(tokens, experts, top_k, hot)
    check_plan(chosen, experts)
    packed = stored(experts, latent, inner)
    norm = torch.rand(latent, device=DEVICE).to(DTYPE)
    got = moe_experts_mxfp4_gpu(x, weights, chosen, packed, activation, norm, 1e-5)
    wide = x.double()
    want = moe_experts(wide, weights, chosen, packed, activation, norm.double(), 1e-5)
    close(f"mxfp4 {what}", got, want)
    plan = plan_gpu(chosen, experts)
    products = {"separate": separate_products}
    if can_join(packed, chosen.numel()):
        products["joined"] = joined_products
        products["joined, cut otherwise"] = partial(joined_products, shapes=OTHER)
    pairs = (wide.repeat_interleave(top_k, 0), torch.ones_like(weights), chosen)
    want = moe_experts(pairs[0], *(t.view(-1, 1) for t in pairs[1:]), packed, activation)
    for name, run in products.items():
        close(f"{name} {what}", run(x, plan, packed, activation, top_k), want)
    if hopper_runs(DEVICE) and can_take(packed, FEW):
        want = moe_experts(wide, weights, chosen, packed, activation, norm.double(), 1e-5)
        got = moe_experts_mxfp4_gpu(x, weights, chosen, packed, activation, norm, 1e-5, few=FEW)
        close(f"few, {what}", got, want)
    w13 = torch.randn(experts, 2 * inner, latent, device=DEVICE).to(DTYPE) * 0.1
    w2 = torch.randn(experts, latent, inner, device=DEVICE).to(DTYPE) * 0.1
    floats = FloatExperts(w13=w13, w2=w2)
    got = moe_experts_gpu(x, weights, chosen, floats, activation, norm, 1e-5)
    want = moe_experts(wide, weights, chosen, floats, activation, norm.double(), 1e-5)
    close(f"dense {what}", got, want)


def check_ways(tokens: int, shape: tuple[int, int, int], top_k: int) -> None:
    """One product a step in fine tiles, by programs in turn and by one for each block."""
    experts, latent, inner = shape
    x = (torch.randn(tokens, latent, device=DEVICE) * 0.1).to(DTYPE)
    _weights, chosen = routing(tokens, experts, top_k, hot=True)
    packed = stored(experts, latent, inner)
    rows, one = x.double().repeat_interleave(top_k, 0), torch.ones(chosen.numel(), 1, device=DEVICE)
    want = moe_experts(rows, one, chosen.view(-1, 1), packed, SITU)
    plan = plan_many_gpu(chosen, experts)
    for shapes, programs in ((SHAPES, 3), (OTHER, None)):
        got = joined_products(x, plan, packed, SITU, top_k, shapes, programs)
        close(f"joined, N {tokens}, E, L, I {shape}, {programs}", got, want)
    got = products_of_many(x, chosen, packed, SITU)
    close(f"many, N {tokens}, E, L, I {shape}", got, want)


def check_glu(activation: GatedActivation) -> None:
    for shape in ((1, 14), (3, 2, 64), (5, 3000)):
        x = (torch.randn(shape, device=DEVICE) * 6).to(DTYPE)
        x[..., :3] = torch.tensor([1e4, -1e4, 0.0], device=DEVICE).to(DTYPE)
        x[..., -2] = -1e4
        close(f"glu {shape}", glu_gpu(x, activation), activation(x.double()))
    x[:, 1], x[0, -1] = float("nan"), float("nan")
    assert torch.equal(glu_gpu(x, activation).isnan(), activation(x).isnan()), "glu: NaN is lost"


def check_router() -> None:
    """Both ways to choose, for any number of experts and choices; ties go to the lower index."""
    few = [(3, *shape) for shape in ((1, 1), (2, 1), (3, 2), (7, 7), (20, 6))]
    for tokens, experts, top_k in [*few, (SORTED_TOKENS + 1, 20, 6)]:
        routing(tokens, experts, top_k, hot=False)
        tied = torch.zeros(tokens, experts, device=DEVICE)
        chosen = route_gpu(tied, tied[0], top_k, renormalise=False, scale=1.0)[1]
        assert (chosen == torch.arange(top_k, device=DEVICE)).all(), "route: ties"
    x, router = (torch.randn(n, 512, device=DEVICE) for n in (40, 24))
    for narrow in (torch.float32, torch.bfloat16):
        given = x.to(DTYPE), router.to(narrow)
        want = router_logits(*(t.double().float() for t in given))
        torch.testing.assert_close(router_logits_gpu(*given), want, rtol=1e-4, atol=1e-3)


def spoilt_logits(tokens: int, experts: int) -> torch.Tensor:
    """Nothing but NaN of either sign, infinities, or some of them, in every other row."""
    logits = torch.randn(tokens, experts, device=DEVICE)
    nan, inf = torch.tensor([float("nan"), float("inf")], device=DEVICE)
    for row, value in enumerate((nan, -nan, inf, -inf)):
        logits[row * 4] = value
        logits[row * 4 + 2, ::3] = value
    logits[14, ::2] = -inf
    return logits


def check_router_of_no_numbers() -> None:
    """Whatever the logits are, experts are there and differ, and other rows are what they were."""
    top_k, experts = 6, 20  # of a block of 32
    bias = torch.randn(experts, device=DEVICE) * 0.1
    spoilt = spoilt_logits(16, experts)
    clean = spoilt.clone()
    clean[::2] = 0.5
    for most in (SORTED_TOKENS, 0):  # either kernel
        gpu.SORTED_TOKENS = most
        for how in (route, route_gpu):
            for added in (bias, bias - float("inf"), bias * float("nan")):
                chosen = how(spoilt, added, top_k, renormalise=True, scale=2.0)[1]
                assert ((chosen >= 0) & (chosen < experts)).all(), f"{how.__name__}: no expert"
                assert chosen.sort(1).values.diff(dim=1).all(), f"{how.__name__}: twice the same"
            got, want = (how(x, bias, top_k, renormalise=True, scale=2.0) for x in (spoilt, clean))
            for a, b in zip(got, want, strict=True):
                assert torch.equal(a[1::2], b[1::2]), f"{how.__name__}: other rows"
            assert got[0][0].isnan().all(), f"{how.__name__}: NaN is lost"
    gpu.SORTED_TOKENS = SORTED_TOKENS


def check_one_token_of_no_numbers() -> None:
    """Its neighbours get what they get beside a token of numbers, to the bit."""
    tokens, shape, top_k = (40, (20, 512, 256), 2) if ON_GPU else (18, (5, 128, 128), 2)
    activation = SiluGLU()
    packed = stored(*shape)
    w13 = torch.randn(shape[0], 2 * shape[2], shape[1], device=DEVICE).to(DTYPE) * 0.1
    w2 = torch.randn(shape[0], shape[1], shape[2], device=DEVICE).to(DTYPE) * 0.1
    floats = FloatExperts(w13=w13, w2=w2)
    weights, chosen = routing(tokens, shape[0], top_k, hot=True)
    x = torch.randn(tokens, shape[1], device=DEVICE).to(DTYPE) * 0.1
    norm = torch.rand(shape[1], device=DEVICE).to(DTYPE)
    spoilt, no_weights = x.clone(), weights.clone()
    spoilt[7], no_weights[7] = float("nan"), float("nan")
    ways = {
        "separate": partial(moe_experts_mxfp4_gpu, products=separate_products),
        "joined": partial(moe_experts_mxfp4_gpu, products=joined_products),
    }
    if hopper_runs(DEVICE):
        ways["few"] = partial(moe_experts_mxfp4_gpu, few=FEW)
    runs = [(name, packed, run) for name, run in ways.items()]
    runs.append(("dense", floats, moe_experts_gpu))
    for name, experts, run in runs:
        want = run(x, weights, chosen, experts, activation, norm, 1e-5)
        got = run(spoilt, no_weights, chosen, experts, activation, norm, 1e-5)
        assert got[7].isnan().all(), f"{name}: NaN is lost"
        want[7] = got[7] = 0
        assert torch.equal(got, want), f"{name}: neighbours of NaN"


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(DTYPE) / shape[-1] ** 0.5


def layer_weights(
    width: int, latent: int, inner: int, shared: int, experts: int, top_k: int,
    activation: GatedActivation = SITU,
) -> MoEWeights[Mxfp4Experts]:  # fmt: skip
    return MoEWeights(
        router=normal(experts, width), router_bias=torch.randn(experts, device=DEVICE) * 0.1,
        down=normal(latent, width), experts=stored(experts, latent, inner),
        norm=normal(latent).abs() + 0.5, up=normal(width, latent),
        shared_gate_up=normal(2 * shared, width), shared_down=normal(width, shared),
        activation=activation, top_k=top_k, renormalise=top_k > 1, scale=1.5, eps=1e-5,
    )  # fmt: skip


def check_layer(weights: MoEWeights[Mxfp4Experts], tokens: int = 1) -> None:
    """The whole layer, onto something or nothing."""
    layer = triton_kernels("checked").latent_moe_mxfp4
    x = normal(tokens, weights.router.shape[1]) * 3
    wide = {
        name: getattr(weights, name).float()
        for name in ("router", "down", "up", "norm", "shared_gate_up", "shared_down")
    }
    want = reference_kernels("checks").latent_moe_mxfp4(x.float(), replace(weights, **wide))
    for onto in (None, torch.randn_like(x)):
        base = 0 if onto is None else onto.clone()
        got = layer(x, weights, onto)
        assert onto is None or got is onto
        error = float((got.float() - want - base).norm() / (want + base).norm())
        assert error < LIMIT, f"layer of {tokens}: {error:.2e}"


def check_combine() -> None:
    """Asked for at once or one after the other: the same sums, to the bit."""
    for tokens, top_k, latent in ((1, 16, 3584), (3, 5, 48), (2, 1, 512)):
        y = normal(tokens * top_k, latent)
        weights, norm = torch.rand(tokens, top_k, device=DEVICE), normal(latent)
        for given in (norm, None):
            some = [
                combine(y, weights, given, 1e-5, torch.full_like(y[:tokens], float("nan")), warps=w)
                for w in (0, 8, 16)
            ]
            want = (weights[:, :, None] * y.view(tokens, top_k, -1)).sum(1)
            want = want if given is None else rms_norm(want.to(DTYPE).float(), given.float(), 1e-5)
            assert float((some[0] - want).norm() / want.norm()) < LIMIT
            if given is None:
                assert torch.equal(some[0], some[1])
                assert torch.equal(some[0], some[2])
            # the norm's sum goes over warps
            assert float((some[2] - some[0]).norm() / some[0].norm()) < LIMIT / 4


def check_recorded() -> None:
    """A token gets the same bits each time, launched, recorded and replayed."""
    weights = layer_weights(256, 512, 512, 512, 8, 4)
    run = triton_kernels("checked").latent_moe_mxfp4
    x, other = normal(1, 256), normal(1, 256)
    want = [run(given, weights) for given in (x, other)]
    for _ in range(20):
        assert torch.equal(run(x, weights), want[0]), "layer: other numbers"
    again = GraphRunner().make(lambda: run(x, weights))
    assert torch.equal(again(), want[0]), "layer: recorded"
    x.copy_(other)
    assert torch.equal(again(), want[1]), "layer: replayed"


def check_few_recorded() -> None:
    """The same in a graph, and whatever other tokens there are that need no wider tiles."""
    packed = stored(20, 512, 512)
    for tokens, hot in ((1, False), (2, False), (8, False), (40, True)):
        weights, chosen = routing(tokens, 20, 2, hot)
        x, other = (torch.randn(tokens, 512, device=DEVICE).to(DTYPE) for _ in range(2))
        experts = partial(moe_experts_mxfp4_gpu, stored=packed, activation=SITU)
        run = partial(experts, x, weights, chosen)
        want = run(), experts(other, weights, chosen)
        if not hot and tokens > 1:
            few = experts(x[1:], weights[1:], chosen[1:], few=FEW)
            some = experts(x, weights, chosen, few=FEW)
            assert torch.equal(few, some[1:]), f"few, {tokens}: other neighbours"
        again = GraphRunner().make(run)
        for _ in range(20):
            assert torch.equal(again(), want[0]), f"few, {tokens}: recorded"
        x.copy_(other)
        assert torch.equal(again(), want[1]), f"few, {tokens}: replayed"


def check_alone(recorded: bool) -> None:
    """A single token, whose rows are dealt out evenly; the same bits each time and in a graph."""
    packed = stored(20, 1792, 768)
    assert takes_alone(packed, 16)
    norm = torch.rand(1792, device=DEVICE).to(DTYPE)
    for activation, scale in ((SITU, norm), (SiluGLU(), None)):
        weights, chosen = routing(1, 20, 16, hot=False)
        room = torch.full((3, 1792), float("nan"), device=DEVICE, dtype=DTYPE)
        room[1] = torch.randn(1792, device=DEVICE).to(DTYPE) * 0.1
        x = room[1:2]
        wide = None if scale is None else scale.double()
        want = moe_experts(x.double(), weights, chosen, packed, activation, wide, 1e-5)
        run = partial(moe_experts_mxfp4_gpu, x, weights, chosen, packed, activation, scale, 1e-5)
        got = run()
        close(f"one token, {activation}", got, want)
        again = GraphRunner().make(run) if recorded else run
        for _ in range(20 if recorded else 1):
            assert torch.equal(run(), got), "one token: other numbers"
            assert torch.equal(again(), got), "one token: recorded"
        x.fill_(float("nan"))
        assert run().isnan().all(), "one token: NaN is lost"


@triton.jit
def decoding_kernel(
    w, scale, first, out, WORDS: tl.constexpr, COPIES: tl.constexpr, JOINED: tl.constexpr
):
    """64 rows by machine code, as the joined products decode them, or as the separate ones."""
    o_m, o_c, o_w = tl.arange(0, 64), tl.arange(0, 128), tl.arange(0, 32)
    for k in tl.static_range(0, WORDS, 16 if JOINED else 32):
        to = out + o_m[:, None] * (8 * WORDS) + k * 8
        if JOINED:
            choices = byte_choices(scale, tl.load(first))
            v = decoded_step(w, scale, o_m, choices, k, WORDS, 64, COPIES, True, tl.bfloat16)
            tl.store(to + (o_c % 16 * 8 + o_c // 16)[None, :], v)
        else:
            some = o_m < 64
            v = decoded_weights(w, scale, o_m, some, k, WORDS, 32, 8, True, True, tl.bfloat16)
            for n in tl.static_range(8):
                tl.store(to + (o_w * 8 + n)[None, :], v[n])


def check_decoding() -> None:
    """What the products decode by machine code, on a CPU too, where they do it without."""
    packed = stored(1, 64, 256)
    codes = torch.randint(0, 256, (64, 128), dtype=torch.uint8, device=DEVICE)
    scales = torch.randint(0, LARGEST_SCALE + 1, (64, 8), dtype=torch.uint8, device=DEVICE)
    scales[0], scales[1] = 0, LARGEST_SCALE
    packed.put(0, "down", codes, scales)
    if not ON_GPU:
        interpret_machine_code()
    want = packed.down(0, torch.bfloat16)
    first = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    for joined, copies in ((True, 1), (True, 2), (False, 0)):
        scale = packed.w2_scale.view(torch.int32) if joined else packed.w2_scale
        out = torch.zeros(64, 256, dtype=torch.bfloat16, device=DEVICE)
        decoding_kernel[(1,)](packed.w2, scale, first, out, 32, copies, joined)
        assert torch.equal(out, want), "machine code decodes something else"


def check_odd() -> None:
    check_decoding()
    check_glu(SITU)
    check_glu(SiluGLU())
    check_router()
    check_router_of_no_numbers()
    check_experts(1, (7, 96, 64), 3, False, SITU)
    check_experts(5, (5, 32, 96), 2, False, SiluGLU())
    check_experts(40, (3, 64, 32), 2, True, SITU)
    check_experts(150, (2, 64, 32), 1, True, SITU)  # a full tile and its rest in one
    check_experts(300, (4, 64, 32), 1, False, SITU)
    check_experts(3, (5, 128, 384), 2, False, SITU)
    check_experts(40, (3, 256, 128), 2, True, SiluGLU())
    check_experts(150, (2, 128, 256), 1, True, SITU)
    check_ways(150, (5, 128, 128), 2)
    check_combine()
    check_layer(layer_weights(64, 32, 96, 48, 5, 2))
    check_layer(layer_weights(32, 64, 32, 40, 3, 1, SiluGLU()))
    check_layer(layer_weights(48, 32, 32, 16, 7, 7), tokens=2)


def check_few() -> None:
    check_one_token_of_no_numbers()
    if not ON_GPU:
        return
    check_experts(3, (5, 256, 512), 2, False, SITU)
    check_experts(40, (20, 512, 256), 2, True, SiluGLU())  # beside one that has wider tiles
    check_experts(1, (9, 1024, 512), 4, False, SITU)
    check_experts(24, (9, 512, 1024), 4, False, SITU)
    large = "small" not in sys.argv[3:]
    check_alone(recorded=large)
    if large:
        check_recorded()
        check_few_recorded()


def check_large() -> None:
    check_experts(150, (40, 256, 512), 2, True, SITU)
    check_layer(layer_weights(256, 512, 512, 512, 40, 16))
    check_layer(layer_weights(7168, 3584, 3072, 6144, 40, 16))
    for tokens in (1, 17, 129, 1000, 5000):
        check_experts(tokens, (40, 3584, 3072), 16, False, SITU)
    check_ways(3000, (400, 512, 384), 16)  # some 120 pairs an expert


seed = 1
sys.stdout.write(f"seed {seed}\n")
torch.manual_seed(seed)
{"odd": check_odd, "few": check_few, "large": check_large}[sys.argv[1]]()
