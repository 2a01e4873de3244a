"""Where the tensors of SGLang's K3 tower lie; the device ``meta`` stands for the GPU.

And what pixels it is given there.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem
from sglang.srt.model_executor.model_runner_components import load_model_utils
from sglang.srt.models import kimi_k3, kimi_k3_vl
from sglang.srt.multimodal import mm_utils
from sglang.srt.multimodal.mm_utils import materialize_multimodal_features

from k3vl.config import K3_MEDIA
from k3vl.sglang.features import NORMALISE_KEY, as_the_tower_wants
from k3vl.sglang.models.k3 import KimiK3ForConditionalGeneration, gather
from k3vl.sglang.plugin import PACKAGES
from k3vl.vision.processor import normalise
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


PATCHES = 4 * 4 * 6 + 8 * 8


def our_items() -> list[MultimodalDataItem]:
    """A group of frames and a picture with every level in every channel, as we hand them over."""
    levels = np.random.default_rng(5).integers(0, 256, (PATCHES, 3, 14, 14), np.uint8)
    pixels = torch.from_numpy(levels)
    mean_and_std = [*K3_MEDIA.image_mean, 0.41, 0.5, 0.27]
    made = []
    for feature, grid in ((pixels[:96], [4, 4, 6]), (pixels[96:], [1, 8, 8])):
        made.append(
            MultimodalDataItem(
                modality=Modality.IMAGE,
                feature=feature,
                offsets=[(0, grid[1] * grid[2] // 4 - 1)],
                model_specific_data={
                    "image_grid_thw": torch.tensor([grid]),
                    NORMALISE_KEY: mean_and_std,
                },
            )
        )
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("moved", [torch.uint8, torch.float32], ids=["uint8", "sglang's buffer"])
def test_the_tower_sees_what_the_processor_would_have_made(
    dtype: torch.dtype, moved: torch.dtype
) -> None:
    """To the bit, on any device, from a feature that SGLang's own float buffer has held too."""
    items = our_items()
    config = replace(K3_MEDIA, image_std=(0.41, 0.5, 0.27))
    expected = [torch.from_numpy(normalise(item.feature.numpy(), config)) for item in items]
    for item in items:
        item.feature = item.feature.to(moved)
    before = [item.feature for item in items]
    views = as_the_tower_wants(items, torch.device("cpu"), dtype)
    found = materialize_multimodal_features(
        [view.feature for view in views], device=torch.device("cpu"), dtype=dtype
    )
    wanted = materialize_multimodal_features(expected, device=torch.device("cpu"), dtype=dtype)
    assert torch.equal(found, wanted)
    assert all(a.feature is b for a, b in zip(items, before, strict=True))
    for item, view in zip(items, views, strict=True):
        assert view.image_grid_thw is item.image_grid_thw
        assert view.offsets is item.offsets


def test_items_of_sglang_s_own_go_through_as_they_are() -> None:
    items = our_items()
    for item in items:
        del item.model_specific_data[NORMALISE_KEY]
    views = as_the_tower_wants(items, torch.device("cpu"), torch.float32)
    assert all(view is item for view, item in zip(views, items, strict=True))


@pytest.mark.parametrize("moved", [False, True], ids=["from the host", "moved by SGLang"])
def test_our_pixels_are_normalised_beside_the_weights(
    monkeypatch: pytest.MonkeyPatch, moved: bool
) -> None:
    """``get_image_feature`` itself, up to the tower: its input, and what the items hold after."""
    model = loaded(KimiK3ForConditionalGeneration, "meta")
    seen: list[torch.Tensor] = []

    def stop(pixels: torch.Tensor, *args: object, **kwargs: object) -> None:
        seen.append(pixels)
        raise InterruptedError

    monkeypatch.setattr(model.vision_tower, "forward", stop)
    ranks = SimpleNamespace(tp_size=1, attn_tp_size=1, attn_tp_rank=0)
    for module in (kimi_k3, mm_utils):
        monkeypatch.setattr(module, "get_parallel", lambda: ranks, raising=False)
    monkeypatch.setattr(kimi_k3, "get_server_args", lambda: ranks, raising=False)
    items = our_items()
    if moved:
        for item in items:
            item.feature = item.feature.to("meta")
    before = [item.feature for item in items]
    with pytest.raises(InterruptedError):
        model.get_image_feature(items)
    (pixels,) = seen
    assert (pixels.device.type, pixels.shape) == ("meta", (PATCHES, 3, 14, 14))
    assert pixels.dtype == model.vision_tower.patch_embed.proj.weight.dtype
    assert all(a.feature is b for a, b in zip(items, before, strict=True))
