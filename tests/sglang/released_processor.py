"""Stands for the image processor that K3's release brings along as remote code.

The same rule, written for the plain pictures of these tests (RGB, no alpha) with nothing of k3vl in
it, under the names that SGLang asks for: ``media_processor``, ``media_proc_cfg``,
``media_tokens_calculator``. Copied into the test checkpoint.
"""

import math

import numpy as np
import torch
from PIL import Image
from transformers.feature_extraction_utils import BatchFeature
from transformers.image_processing_utils import BaseImageProcessor
from transformers.processing_utils import ProcessorMixin


class TinyK3VisionProcessor(BaseImageProcessor):
    model_input_names = ("pixel_values", "grid_thws")

    def __init__(self, media_proc_cfg=None, **kwargs):
        super().__init__(**kwargs)
        self.media_proc_cfg = dict(media_proc_cfg or {})

    def _sizes(self, width, height):
        """Size after the resize, and after padding to whole 2x2 patches."""
        cfg = self.media_proc_cfg
        patch, longest = cfg["patch_size"], cfg["patch_limit_on_one_side"] * cfg["patch_size"]
        patches = max(1.0, width // patch) * max(1.0, height // patch)
        budget = math.sqrt(cfg["in_patch_limit"] / patches)
        scale = min(1.0, budget, longest / width, longest / height)
        resized = [min(max(1, int(side * scale)), longest) for side in (width, height)]
        cell = patch * cfg["merge_kernel_size"]
        return resized, [math.ceil(side / cell) * cell for side in resized]

    def media_tokens_calculator(self, media):
        _, padded = self._sizes(*media["image"].size)
        return (
            math.prod(padded)
            // (self.media_proc_cfg["patch_size"] * self.media_proc_cfg["merge_kernel_size"]) ** 2
        )

    def preprocess(self, medias, return_tensors=None, **kwargs):
        cfg, pixels, grids = self.media_proc_cfg, [], []
        patch = cfg["patch_size"]
        mean, std = (np.asarray(cfg[name], np.float32) for name in ("image_mean", "image_std"))
        for media in medias:
            image = media["image"].convert("RGB")
            resized, (width, height) = self._sizes(*image.size)
            canvas = np.zeros((height, width, 3), np.uint8)
            shown = image.resize(resized, Image.Resampling.BICUBIC)
            canvas[: resized[1], : resized[0]] = np.asarray(shown)
            # float64 for the division, as torchvision's to_tensor rounds once, to float32.
            levels = (canvas / 255.0).astype(np.float32)
            scaled = (levels - mean) * (1.0 / std.astype(np.float64)).astype(np.float32)
            rows, columns = height // patch, width // patch
            cells = scaled.reshape(rows, patch, columns, patch, 3).transpose(0, 2, 4, 1, 3)
            pixels.append(torch.from_numpy(cells.reshape(-1, 3, patch, patch).copy()))
            grids.append([1, rows, columns])
        return BatchFeature({"pixel_values": torch.cat(pixels), "grid_thws": torch.tensor(grids)})

    __call__ = preprocess


class TinyK3Processor(ProcessorMixin):
    attributes = ("image_processor", "tokenizer")
    image_processor_class = "AutoImageProcessor"
    tokenizer_class = "AutoTokenizer"

    def __init__(self, image_processor=None, tokenizer=None, chat_template=None, **kwargs):
        super().__init__(image_processor, tokenizer, chat_template=chat_template)
        self.media_processor = image_processor

    def __call__(self, text=None, medias=None, return_tensors="pt", **kwargs):
        out = dict(self.tokenizer(text, return_tensors=return_tensors))
        if medias:
            out.update(self.media_processor.preprocess(medias))
        return BatchFeature(out)
