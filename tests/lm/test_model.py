"""The language model: cached, chunked and batched forwards are one full forward."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from k3vl.lm.batch import Row, build_batch
from k3vl.lm.kda import KimiDeltaAttention
from k3vl.lm.mla import LOW_RANK_EPS, MultiHeadLatentAttention
from k3vl.lm.residual import AttentionResidualStream, ReadWeights
from tests.tiny import (
    COMPILED,
    CPU,
    KERNELS,
    KIMI_LINEAR,
    REFERENCE,
    TINY,
    Runner,
    fill,
    tiny_model,
    tokens,
)

pytestmark = pytest.mark.usefixtures("poisoned_memory")

# Rounding of one float32 layer is 1e-7; the random mixtures of five layers amplify it. A wrong
# window, slot or mask is off by 1e-2 and more.
TOLERANCE = 1e-4
LENGTH = 53
PAGES = list(range(4))


def full_logits(config=TINY, kernels=REFERENCE) -> tuple[list[int], torch.Tensor]:
    """Every position's logits by one forward."""
    ids = tokens(LENGTH, vocab=config.vocab_size)
    row = Row(token_ids=ids, context_len=0, slot=0, pages=PAGES)
    return ids, Runner(tiny_model(config, kernels=kernels)).run([row], all_logits=True)


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    assert got.isfinite().all()
    return float((got - want).norm() / want.norm())


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("config", [TINY, KIMI_LINEAR], ids=["k3", "kimi-linear"])
@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 16, 17, 52])
def test_any_chunking_gives_the_full_forward(config, kernels, chunk: int) -> None:
    ids, want = full_logits(config, kernels)
    runner = Runner(tiny_model(config, kernels=kernels))
    got, done = [], 0
    while done < LENGTH:
        part = ids[done : done + chunk]
        row = Row(token_ids=part, context_len=done, slot=2, pages=PAGES)
        got.append(runner.run([row], all_logits=True))
        done += len(part)
    assert relative_error(torch.cat(got), want) < TOLERANCE
    assert torch.equal(torch.cat(got), want) or not kernels.row_independent


@pytest.mark.parametrize("config", [TINY, KIMI_LINEAR], ids=["k3", "kimi-linear"])
def test_compiled_kernels_give_the_logits_of_the_reference(config) -> None:
    _, want = full_logits(config)
    assert relative_error(full_logits(config, COMPILED)[1], want) < TOLERANCE


def test_expanded_and_absorbed_attention_agree() -> None:
    """One token by decode (absorbed MLA, recurrent KDA) against prefill (expanded, chunked)."""
    ids, want = full_logits()
    for cached in (1, 2, 15, 16, 17, LENGTH - 1):
        runner = Runner(tiny_model())
        runner.run([Row(token_ids=ids[:cached], context_len=0, slot=0, pages=PAGES)])
        row = Row(token_ids=ids[cached : cached + 1], context_len=cached, slot=0, pages=PAGES)
        assert relative_error(runner.run([row])[0], want[cached]) < TOLERANCE


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_batch_is_its_members_alone(kernels) -> None:
    """Decoding, prefilling from nothing and from a prefix in one step, in scattered slots."""
    lengths, model = (1, 40, 7, 1, 23), tiny_model(kernels=kernels)
    prompts = [tokens(n + 9, seed=n) for n in lengths]
    together = Runner(model, slots=6)
    alone = []
    rows = []
    for i, (length, ids) in enumerate(zip(lengths, prompts, strict=True)):
        pages = [10 * i + 3, 10 * i + 1, 10 * i + 7, 10 * i + 2]
        single = Runner(model)
        head = Row(token_ids=ids[:9], context_len=0, slot=1, pages=pages)
        tail = Row(token_ids=ids[9 : 9 + length], context_len=9, slot=1, pages=pages)
        single.run([head])
        alone.append(single.run([tail])[0])
        slot = (5, 0, 3, 1, 4)[i]
        together.run([dataclasses.replace(head, slot=slot)])
        rows.append(dataclasses.replace(tail, slot=slot))
    order = sorted(range(5), key=lambda i: lengths[i] != 1)
    logits = together.run([rows[i] for i in order])
    for row, i in zip(logits, order, strict=True):
        assert relative_error(row, alone[i]) < TOLERANCE
        assert torch.equal(row, alone[i]) or not kernels.row_independent


def test_a_slot_is_reset_between_requests() -> None:
    ids, want = full_logits()
    runner = Runner(tiny_model())
    runner.run([Row(token_ids=tokens(20, seed=9), context_len=0, slot=0, pages=PAGES)])
    runner.cache.clear(runner.units(0))
    row = Row(token_ids=ids, context_len=0, slot=0, pages=PAGES)
    assert torch.equal(runner.run([row], all_logits=True), want)


@pytest.mark.parametrize("kernels", KERNELS)
def test_unwritten_cache_memory_has_no_influence(kernels) -> None:
    ids, want = full_logits()
    runner = Runner(tiny_model(kernels=kernels))
    runner.cache.buffer.view(torch.float32).fill_(float("nan"))
    runner.cache.clear(runner.units(0))
    for i in range(10):
        row = Row(token_ids=ids[i : i + 1], context_len=i, slot=0, pages=PAGES)
        other = Row(token_ids=tokens(1), context_len=0, slot=1, pages=[9])
        runner.cache.clear(runner.units(1))
        logits = runner.run([row, other])
        assert relative_error(logits[0], want[i]) < TOLERANCE


def test_features_replace_embeddings_wherever_a_chunk_ends() -> None:
    """Media features split over chunks equal one forward, and equal embeddings when they are."""
    model, ids = tiny_model(), tokens(20)
    features = torch.randn(11, TINY.hidden_size, generator=torch.Generator().manual_seed(3))
    whole = Runner(model).run(
        [Row(token_ids=ids, context_len=0, slot=0, pages=PAGES, features=[(4, features)])]
    )
    runner = Runner(model)
    runner.run(
        [Row(token_ids=ids[:9], context_len=0, slot=0, pages=PAGES, features=[(4, features[:5])])]
    )
    rest = Row(token_ids=ids[9:], context_len=9, slot=0, pages=PAGES, features=[(0, features[5:])])
    assert relative_error(runner.run([rest]), whole) < TOLERANCE

    embedded = model.embedding[torch.tensor(ids[4:15])]
    same = Row(token_ids=ids, context_len=0, slot=0, pages=PAGES, features=[(4, embedded)])
    plain = Row(token_ids=ids, context_len=0, slot=0, pages=PAGES)
    assert torch.equal(Runner(model).run([same]), Runner(model).run([plain]))


# ------------------------------------------------------------------ attention residuals


def test_residual_schedule_with_a_partial_last_block() -> None:
    """Rows seen: ceil(l / 2) + 1 before attention, floor(l / 2) + 2 before the MLP."""
    x = torch.randn(3, TINY.hidden_size)
    stream = AttentionResidualStream(len(x), x, TINY)
    stream.first.copy_(x)
    weights = ReadWeights(TINY, REFERENCE, dtype=torch.float32, device=CPU)
    fill(weights)
    attention, mlp = [], []
    for layer in range(TINY.num_hidden_layers):
        stream.read(weights)
        attention.append(stream.live)
        stream.begin_layer(layer)
        stream.add(torch.randn_like(x))
        stream.read(weights)
        mlp.append(stream.live)
        stream.add(torch.randn_like(x))
    assert attention == [-(-layer // 2) + 1 for layer in range(5)]
    assert mlp == [layer // 2 + 2 for layer in range(5)]
    assert stream.live == 4, "three blocks and the embedding"


def test_frozen_rows_are_never_written_again() -> None:
    x = torch.randn(3, TINY.hidden_size)
    stream = AttentionResidualStream(len(x), x, TINY)
    stream.first.copy_(x)
    frozen: list[torch.Tensor] = []
    for layer in range(TINY.num_hidden_layers):
        stream.begin_layer(layer)
        if layer % 2 == 0:
            frozen.append(stream.rows[stream.live - 2].clone())
        for _ in "am":
            stream.add(torch.randn_like(x))
    assert torch.equal(frozen[0], x), "the first row is the embedding"
    for row, copy in zip(stream.rows, frozen, strict=False):
        assert torch.equal(row, copy)


def test_a_block_row_is_the_sum_of_its_outputs_without_the_stream_before() -> None:
    x = torch.randn(2, TINY.hidden_size)
    stream = AttentionResidualStream(len(x), x, TINY)
    stream.first.copy_(x)
    outputs = [torch.randn_like(x) for _ in range(4)]
    for layer in range(2):
        stream.begin_layer(layer)
        stream.add(outputs[2 * layer])
        stream.add(outputs[2 * layer + 1])
    assert torch.allclose(stream.rows[1], sum(outputs[1:], outputs[0]))


# ------------------------------------------------------------------ traps


def test_low_rank_norms_do_not_take_the_configured_epsilon() -> None:
    layer = MultiHeadLatentAttention(TINY, REFERENCE, dtype=torch.float32, device=CPU)
    assert layer.kv_norm.eps == LOW_RANK_EPS == 1e-6
    assert layer.query.norm.eps == LOW_RANK_EPS


def test_layer_kinds_come_from_the_one_based_lists() -> None:
    kinds = [isinstance(layer.attn, KimiDeltaAttention) for layer in tiny_model().layers]
    assert kinds == [True, False, True, True, False]


def test_output_gate_acts_before_the_output_projection() -> None:
    """Gates shut at -inf silence a layer; were they after o_proj, its rows would mix first."""
    layer = MultiHeadLatentAttention(TINY, REFERENCE, dtype=torch.float32, device=CPU)
    fill(layer)
    with torch.no_grad():
        layer.in_proj.weight[-TINY.num_attention_heads * TINY.v_head_dim :] = -1e4
        x = torch.rand(4, TINY.hidden_size) + 0.1
    runner = Runner(tiny_model())
    row = Row(token_ids=[0] * 4, context_len=0, slot=runner.units(0), pages=[0])
    batch = build_batch([row], runner.cache)
    assert not layer(x, batch, torch.zeros(16, 16)).any()


def test_short_prompts_than_the_convolution_window() -> None:
    for length in (1, 2, 3):
        ids, model = tokens(length + 1, seed=length), tiny_model()
        row = Row(token_ids=ids, context_len=0, slot=0, pages=PAGES)
        want = Runner(model).run([row])
        runner = Runner(model)
        runner.run([Row(token_ids=ids[:length], context_len=0, slot=0, pages=PAGES)])
        last = Row(token_ids=ids[length:], context_len=length, slot=0, pages=PAGES)
        assert relative_error(runner.run([last]), want) < TOLERANCE
