"""Lets SGLang's own server run a tiny K3 without a GPU: a test vehicle, not a way to serve.

SGLang calls :func:`register` in each of its processes. Replaced are CUDA's stream objects, the
timing of the Triton autotuner (the interpreter has nothing to time), the KDA recurrence, whose
chunk kernel Triton's interpreter rejects, and the kernel pair of the attention residuals, which
SGLang has in PyTorch as well and which takes six sevenths of a prefill here. Everything else is
SGLang: server, scheduler, memory pools, model code, weight loading, and its other Triton kernels,
through the interpreter.

``K3VL_TEST_ENCODED`` names a file that collects how many items each call of the vision tower got.
"""

import contextlib
import json
import os
from pathlib import Path

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

KDA_KERNEL = "sglang.srt.layers.attention.linear.kernels.kda_triton.TritonKDAKernel"
BACKEND = "sglang.srt.layers.attention.attention_registry.attn_backend_wrapper"
RESIDUALS = "sglang.srt.layers.attn_residual._mix_fused"
ENCODER = "sglang.srt.models.kimi_k3.KimiK3ForConditionalGeneration.get_image_feature"


class _Stream:
    """A stream or an event of a device that does everything in order."""

    device = torch.device("cpu")

    def __init__(self, *args, **kwargs):
        pass

    def record_event(self, *args):
        return _Stream()

    def query(self):
        return True

    def _nothing(self, *args):
        pass

    wait_stream = wait_event = synchronize = record = wait = _nothing


def register():
    torch.cuda.Stream = torch.cuda.Event = _Stream
    torch.cuda.current_stream = _Stream
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
    _first_configuration()
    HookRegistry.register(BACKEND, _with_recurrence, HookType.AROUND)
    HookRegistry.register(RESIDUALS, _mix, HookType.REPLACE)
    if "K3VL_TEST_ENCODED" in os.environ:
        HookRegistry.register(ENCODER, _count_items, HookType.BEFORE)


def _first_configuration():
    from triton.runtime.autotuner import Autotuner

    def run(self, *args, **kwargs):
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        config = self.configs[0] if len(self.configs) == 1 else self.prune_configs(kwargs)[0]
        settings = config.all_kwargs()
        if config.pre_hook is not None:
            config.pre_hook({**self.nargs, **kwargs, **settings})
        try:
            return self.fn.run(*args, **kwargs, **settings)
        finally:
            self.nargs = None

    Autotuner.run = run


def _count_items(model, items):
    with Path(os.environ["K3VL_TEST_ENCODED"]).open("a", encoding="utf-8") as file:
        file.write(json.dumps([item.image_grid_thw.tolist()[0] for item in items]) + "\n")


def _mix(*args):
    from sglang.srt.layers.attn_residual import aggregate_stream_torch

    return aggregate_stream_torch(*args)


def _with_recurrence(original, *args, **kwargs):
    from sglang.srt.layers.attention.linear.kernels.kda_triton import TritonKDAKernel

    TritonKDAKernel.extend = _extend
    TritonKDAKernel.decode = _decode
    TritonKDAKernel.supports_packed_decode = False
    TritonKDAKernel.supports_track_state_snapshot = False
    return original(*args, **kwargs)


def _extend(self, q, k, v, g, beta, *, beta_is_raw=False, return_intermediate_states=False, **rest):
    assert beta_is_raw
    assert not return_intermediate_states
    return _run(q, k, v, g, beta, **rest)


def _decode(self, q, k, v, a, b, **rest):
    return _run(q, k, v, a, b, **rest)


def _run(
    q, k, v, gate, beta, *, A_log, dt_bias, ssm_states, cache_indices, query_start_loc,
    lower_bound=None, **_,
):  # fmt: skip
    """Kimi Delta Attention as its definition says; the state's axes are head, value, key."""
    heads, value_dim = v.shape[-2:]
    q, k, v = (x.float().reshape(-1, heads, x.shape[-1]) for x in (q, k, v))
    q, k = (x / torch.sqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q = q * q.shape[-1] ** -0.5
    raw = gate.float().reshape(k.shape) + dt_bias.float().reshape(heads, -1)
    rate = A_log.float().reshape(heads, 1).exp()
    if lower_bound is None:
        decay = (-rate * torch.nn.functional.softplus(raw)).exp()
    else:
        decay = (lower_bound * torch.sigmoid(rate * raw)).exp()
    strength = beta.float().reshape(-1, heads, 1).sigmoid()
    out = torch.empty(v.shape[0], heads, value_dim)
    ends = query_start_loc.tolist()
    for start, end, slot in zip(ends, ends[1:], cache_indices.tolist(), strict=False):
        if start == end:
            continue
        state = ssm_states[slot].float()
        for t in range(start, end):
            state = state * decay[t].unsqueeze(1)
            error = v[t] - torch.einsum("hvk,hk->hv", state, k[t])
            state = state + torch.einsum("hv,hk->hvk", strength[t] * error, k[t])
            out[t] = torch.einsum("hvk,hk->hv", state, q[t])
        ssm_states[slot] = state.to(ssm_states.dtype)
    return out.to(ssm_states.dtype).unsqueeze(0)
