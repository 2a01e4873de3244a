"""Checkpoint directories of the demo model: read one, write one, round one to 8 bits.

``python -m k3vl.demo.pack SOURCE [SOURCE ...] TARGET`` turns training results (bfloat16 shards)
into the directory that ships; of several, the mean of their weights. The encodings themselves
are ``k3vl.checkpoint``'s.
"""

from __future__ import annotations

import argparse
import math
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from k3vl.checkpoint import CheckpointReader, Placement
from k3vl.checkpoint_writer import save_checkpoint
from k3vl.demo.convert import entries
from k3vl.demo.geometry import DEMO, SPECIAL_ID, Geometry, hf_config
from k3vl.kernels.int8 import quantize_int8

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

CHECKPOINT = Path(__file__).with_name("checkpoint")
"""The shipped checkpoint."""

PREFIXES = ("language_model.", "vision_tower.", "mm_projector.")
MIN_CONFIDENCE = 0.93
"""Measured by ``benchmarks/demo_accuracy.py``; see :attr:`k3vl.pipeline.Reply.confidence`."""

_COPIED = ("tokenizer.json", "NOTICE", "README.md")
_GROUP = 256
# Below this many values a tensor is not quantised: norms, router, write strength.
_SMALL = 4096
# K3 keeps these in float32; they set how fast a state decays and which expert is chosen.
_FLOAT32 = ("A_log", "dt_bias", "e_score_correction_bias")


def read_tensors(directory: Path, g: Geometry = DEMO) -> dict[str, Tensor]:
    """All tensors of a demo checkpoint, decoded to float32, by K3's names.

    Raises:
        WeightError: names or shapes are not the demo model's, or a file is damaged.
    """
    out = {entry.name: torch.empty(entry.shape) for entry in entries(g)}
    reader = CheckpointReader(directory)
    reader.require_only(PREFIXES)
    reader.load_into({name: Placement(t) for name, t in out.items()}, prefixes=PREFIXES)
    return out


def mean_of(directories: Sequence[Path]) -> dict[str, Tensor]:
    """The mean of checkpoints that come from one another by training, tensor by tensor.

    Such a mean answers unseen drawings and unseen words better than each of them does (Wortsman et
    al., "Model soups", arXiv:2203.05482; "Robust fine-tuning", arXiv:2109.01903): ends of
    short runs differ in what they happened to see last.
    """
    first, *others = directories
    out = read_tensors(first)
    for directory in others:
        for name, value in read_tensors(directory).items():
            out[name] += value
    return {name: value / len(directories) for name, value in out.items()}


def encode_int8(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Matrices to int8 with one float16 scale for 256 columns or a row; the rest bfloat16."""
    out: dict[str, Tensor] = {}
    for name, value in tensors.items():
        columns = math.prod(value.shape[1:])
        if value.ndim < 2 or value.numel() < _SMALL or "conv1d" in name:
            out[name] = _plain(name, value)
            continue
        group = _GROUP if columns % _GROUP == 0 else columns
        out[name], out[f"{name}_scale"] = quantize_int8(value, group)
    return out


def encode_bf16(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Everything as bfloat16 but what K3 keeps in float32."""
    return {name: _plain(name, value) for name, value in tensors.items()}


def _plain(name: str, value: Tensor) -> Tensor:
    return value.float() if name.endswith(_FLOAT32) else value.bfloat16()


def json_files() -> dict[str, dict[str, Any]]:
    """Configuration files of the shipped checkpoint."""
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {
                    "num_bits": 8,
                    "type": "int",
                    "symmetric": True,
                    "strategy": "group",
                    "group_size": _GROUP,
                    "dynamic": False,
                },
            }
        },
    }
    config = hf_config()
    config["text_config"]["quantization_config"] = quantization
    eos = SPECIAL_ID["<|end_of_msg|>"]
    return {
        "config.json": config,
        "preprocessor_config.json": {"media_proc_cfg": _media_config()},
        "generation_config.json": {
            "bos_token_id": SPECIAL_ID["<|bos|>"],
            "eos_token_id": [eos, SPECIAL_ID["<|eos|>"]],
            "pad_token_id": SPECIAL_ID["<|pad|>"],
            "do_sample": False,
            "max_new_tokens": 128,
            "chat_template_kwargs": {"thinking": False},
            "min_confidence": MIN_CONFIDENCE,
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|bos|>",
            "eos_token": "<|end_of_msg|>",
            "pad_token": "<|pad|>",
            "unk_token": "<|unk|>",
            "add_bos_token": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": 4096,
        },
    }


def _media_config() -> dict[str, Any]:
    """K3's media settings with a patch budget that fits a 2-core machine."""
    return {
        "in_patch_limit": 1024,
        "patch_size": 14,
        "merge_kernel_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "fixed_output_tokens": None,
        "patch_limit_on_one_side": 512,
        "in_patch_limit_each_frame": 256,
        "sample_fps": 2.0,
        "temporal_merge_kernel_size": 4,
        "timestamp_mode": "hh:mm:ss.fff",
        "transparent_bg_config": {
            "pattern": "chessboard",
            "chessboard_square_size": 8,
            "chessboard_square_on_top_left": True,
            "chessboard_white_value": 255,
            "chessboard_gray_value": 180,
        },
        "transparent_bg_fill_stage": "after_resize",
    }


def write_shipped(directory: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write the 8-bit checkpoint, with the vocabulary and notices of the present one.

    Raises:
        WeightError: the directory holds weights already, or cannot be written.
    """
    save_checkpoint(directory, encode_int8(tensors), json_files=json_files())
    for name in _COPIED:
        source = CHECKPOINT / name
        if source.is_file() and source.resolve() != (directory / name).resolve():
            shutil.copyfile(source, directory / name)


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m k3vl.demo.pack", description=__doc__)
    parser.add_argument(
        "source",
        type=Path,
        nargs="+",
        help="checkpoint directories; their mean is packed",
    )
    parser.add_argument("target", type=Path, help="directory for the 8-bit checkpoint")
    args = parser.parse_args(arguments)
    write_shipped(args.target, mean_of(args.source))


if __name__ == "__main__":
    main()
