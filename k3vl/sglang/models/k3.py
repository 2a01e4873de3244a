"""SGLang's K3, with every tensor of its vision side where the weights are, and our pixels there.

SGLang builds a model under ``with torch.device(...)``, which places what is created there, and
loads weights into it; the loaders for K3's formats never call ``model.to``. A buffer made from a
NumPy array is created elsewhere and stays on the CPU. K3's tower has one, the embedding of time
(``time_weight`` of ``Learnable2DInterpPosEmbDividedFixed`` in ``kimi_k3_vl.py``, in 0.5.17 and
0.5.23). Only groups of several frames read it, and SGLang's own K3 takes no clips: on a GPU the
first clip ended the scheduler with an error about two devices.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from sglang.srt.models import kimi_k3
from torch import Tensor

from k3vl.sglang.features import as_the_tower_wants

if TYPE_CHECKING:
    from torch import nn

log = logging.getLogger(__name__)


class KimiK3ForConditionalGeneration(kimi_k3.KimiK3ForConditionalGeneration):  # type: ignore[misc] # SGLang is not typed
    """SGLang's own class, under the name by which it finds a model."""

    def precompile_kernels_after_loading(self) -> None:
        """Called by SGLang when a model's weights are loaded, on every device and by every loader.

        Before the first picture, so a captured CUDA graph of the tower copies nothing from the CPU.
        """
        for part in (self.vision_tower, self.mm_projector):
            moved = gather(part)
            if moved:
                log.info("k3vl: moved beside the weights: %s", ", ".join(moved))
        super().precompile_kernels_after_loading()

    def get_image_feature(self, items: list[Any]) -> Tensor:
        """Called by SGLang for pictures and clips that its cache of embeddings does not have."""
        weight = self.vision_tower.patch_embed.proj.weight
        wanted = as_the_tower_wants(items, self.vision_tower.device, weight.dtype)
        return super().get_image_feature(wanted)  # type: ignore[no-any-return]


def gather(module: nn.Module) -> list[str]:
    """Move buffers, and tensors that are plain attributes, to the device of the parameters.

    Args:
        module: has parameters, all on one device. Values and dtypes stay as they are.

    Returns:
        Names of what was moved.
    """
    device = next(module.parameters()).device
    moved = []
    for path, part in module.named_modules():
        for own in (part._buffers, vars(part)):
            for name, value in own.items():
                if isinstance(value, Tensor) and value.device != device:
                    own[name] = value.to(device)
                    moved.append(f"{path}.{name}")
    return moved


EntryClass = KimiK3ForConditionalGeneration
