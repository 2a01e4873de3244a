"""Where the tensors of SGLang's K3 tower lie; the device ``meta`` stands for the GPU."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch
from sglang.srt.model_executor.model_runner_components import load_model_utils
from sglang.srt.models import kimi_k3, kimi_k3_vl

from k3vl.sglang.models.k3 import KimiK3ForConditionalGeneration, gather
from k3vl.sglang.plugin import PACKAGES
from tests.sglang import kit

if TYPE_CHECKING:
    from collections.abc import Callable

WIDTH = 32
"""Of the tower, over two heads."""


def built(model: type, device: str) -> kimi_k3.KimiK3ForConditionalGeneration:
    """The vision side, made as SGLang's loaders make a model."""
    vision = SimpleNamespace(
        hidden_size=WIDTH,
        num_attention_heads=2,
        num_hidden_layers=2,
        intermediate_size=2 * WIDTH,
        patch_size=14,
        merge_kernel_size=(2, 2),
        merge_type="sd2_tpool",
        init_pos_emb_height=8,
        init_pos_emb_width=8,
        init_pos_emb_time=4,
        pos_emb_type="divided_fixed",
        pos_emb_interpolation_mode="bicubic",
        mm_hidden_size=WIDTH,
        text_hidden_size=WIDTH,
        projector_ln_eps=1e-5,
    )
    config = SimpleNamespace(vision_config=vision, encoder_only=True, language_only=False)
    with torch.device(device):
        return model(config)


def loaded(model: type, device: str) -> kimi_k3.KimiK3ForConditionalGeneration:
    """The same as its runner has it when weights are loaded."""
    made = built(model, device)
    load_model_utils.maybe_precompile_model_kernels_after_loading(made, device)
    return made


@pytest.fixture
def encode(
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[[kimi_k3.KimiK3ForConditionalGeneration, list[list[int]]], torch.Tensor]:
    """Patches of these grids through tower and projector, as ``get_image_feature`` hands them."""
    prepare = kimi_k3_vl.prepare_vision_attention_metadata
    monkeypatch.setattr(  # a tensor without values has no largest one
        kimi_k3_vl,
        "prepare_vision_attention_metadata",
        lambda *args, **kwargs: prepare(*args, **{"max_seqlen": 1, **kwargs}),
    )

    def run(model: kimi_k3.KimiK3ForConditionalGeneration, grids: list[list[int]]) -> torch.Tensor:
        device = model.vision_tower.device
        patches = torch.zeros(sum(t * h * w for t, h, w in grids), 3, 14, 14, device=device)
        with torch.inference_mode():
            found = model.vision_tower(
                patches, grid_hw=torch.tensor(grids, device=device), grid_thw_list=grids
            )
            projected: torch.Tensor = model.mm_projector(torch.cat(found))
        return projected

    return run


GROUPS = [[4, 4, 6], [1, 8, 8], [2, 8, 8], [3, 2, 2]]
"""A whole group, a picture of the table's own size, shorter groups."""


def test_native_sglang_leaves_the_embedding_of_time_behind(
    encode: Callable[..., torch.Tensor],
) -> None:
    """Where this fails SGLang has been mended, and ``gather`` has nothing more to do."""
    native = loaded(kimi_k3.KimiK3ForConditionalGeneration, "meta")
    assert encode(native, [[1, 4, 6]]).shape == (6, WIDTH)
    with pytest.raises(RuntimeError, match="device"):
        encode(native, GROUPS)


def test_groups_of_frames_are_encoded_where_the_weights_are(
    encode: Callable[..., torch.Tensor],
) -> None:
    model = loaded(KimiK3ForConditionalGeneration, "meta")
    assert encode(model, GROUPS).shape == (6 + 16 + 16 + 1, WIDTH)
    assert {tensor.device.type for tensor in tensors(model)} == {"meta"}


def tensors(module: torch.nn.Module) -> list[torch.Tensor]:
    """All that a module holds: parameters, buffers, plain attributes."""
    return [
        value
        for part in module.modules()
        for own in (part._parameters, part._buffers, vars(part))
        for value in own.values()
        if isinstance(value, torch.Tensor)
    ]


def test_what_is_moved_keeps_its_dtype() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 2, dtype=torch.bfloat16, device="meta"))
    part = module[0]
    part.register_buffer("table", torch.zeros(3, dtype=torch.complex64))
    part.ids = torch.arange(2)
    part.shape_only = torch.zeros(3, dtype=torch.float64, device="meta")
    assert gather(module) == ["0.table", "0.ids"]
    assert (part.table.device.type, part.table.dtype) == ("meta", torch.complex64)
    assert (part.ids.device.type, part.ids.dtype) == ("meta", torch.int64)
    assert gather(module) == []


def test_nothing_moves_on_a_cpu() -> None:
    model = built(KimiK3ForConditionalGeneration, "cpu")
    before = model.vision_tower.patch_embed.pos_emb.time_weight
    assert gather(model) == []
    assert model.vision_tower.patch_embed.pos_emb.time_weight is before


def test_sglang_builds_our_class() -> None:
    """In a process that is started as SGLang's scheduler is, with the plugin's environment."""
    code = (
        "from sglang.srt.models.registry import ModelRegistry as r;"
        "c, _ = r.resolve_model_cls(['KimiK3ForConditionalGeneration']); print(c.__module__);"
        "c, _ = r.resolve_model_cls(['LlamaForCausalLM']); print(c.__module__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=kit.environment(**PACKAGES),
        cwd=kit.ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split()[-2:] == ["k3vl.sglang.models.k3", "sglang.srt.models.llama"]
