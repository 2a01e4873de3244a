"""A tiny K3 with one thing to say: a model that knows nothing never makes a tool call by itself.

What the random layers make of a prompt and of the answer so far is another vector at every place,
so there is a head that turns each into the answer's next token. Taken is the one nearest to the
random head (least squares); everything else of the model stays as it was.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save_file

from k3vl.checkpoint import CheckpointReader
from k3vl.config import load_config
from k3vl.kernels.choice import reference_kernels
from k3vl.kernels.weight import AsAllocated
from k3vl.lm.batch import Row, build_batch
from k3vl.lm.cache import HybridCache, plan_cache
from k3vl.lm.weights import load_model
from k3vl.pipeline import Pipeline
from k3vl.types import ChatOptions

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from k3vl.lm.model import K3Model

TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {"at": {"type": "string"}},
            "required": ["at"],
        },
    },
}
ASKED = [{"role": "user", "content": "hi"}]
ARGUMENTS = {"at": "a cat"}
ANSWER = (
    "<|close|>response<|sep|>"
    '<|open|>tools<|sep|><|open|>call tool="look" index="1"<|sep|>'
    '<|open|>argument key="at" type="string"<|sep|>a cat<|close|>argument<|sep|>'
    "<|close|>call<|sep|><|close|>tools<|sep|>"
)
"""What it says to ``ASKED`` with ``TOOL`` and without thinking; SGLang's grammar for calls ends it
here, before the message's own end."""

CPU = torch.device("cpu")
HEAD = "language_model.lm_head.weight"
MARGIN = 12.0
"""By which the taught token's logit lies above all others."""


def teach_the_call(directory: Path) -> None:
    """Let a checkpoint answer ``ASKED`` with ``ANSWER``, and the same without tools as before."""
    with Pipeline.load(directory, device="cpu") as pipeline:
        options = ChatOptions(thinking=False)
        with_tool, without = (
            pipeline.prepare(pipeline.request(ASKED, tools=tools, options=options)).prompt.token_ids
            for tools in ([TOOL], [])
        )
        answer = pipeline.tokenizer.encode_segment(ANSWER, True)
    teach(directory, with_tool, answer, kept=without)


def teach(
    directory: Path, prompt: Sequence[int], answer: Sequence[int], *, kept: Sequence[int]
) -> None:
    """Give a checkpoint a head that continues a prompt with an answer, greedily.

    Args:
        directory: a checkpoint in one file, which is replaced.
        prompt, answer: token ids.
        kept: token ids after each of which its choice stays what it is.
    """
    config = load_config(directory).text
    model = load_model(
        CheckpointReader(directory), config, reference_kernels("a test"), dtype=torch.float32,
        device=CPU,
    )  # fmt: skip
    head = model.head.weight.clone()
    model.head.weight = torch.nn.Parameter(torch.eye(config.hidden_size), requires_grad=False)
    model.bind(AsAllocated())
    said = _hidden(model, [*prompt, *answer[:-1]])[len(prompt) - 1 :]
    hidden = torch.cat([said, _hidden(model, kept)])
    logits = hidden @ head.T
    missing = torch.zeros_like(logits)
    rows, targets = torch.arange(len(answer)), torch.tensor(answer)
    missing[rows, targets] = logits[rows].amax(-1) + MARGIN - logits[rows, targets]
    change = torch.linalg.lstsq(hidden.double(), missing.double(), driver="gelsd").solution.T
    path = directory / "model.safetensors"
    tensors = load_file(path)
    tensors[HEAD] = (head + change).to(tensors[HEAD].dtype)
    path.unlink()  # it may be a link
    save_file(tensors, path, metadata={"format": "pt"})


def _hidden(model: K3Model, ids: Sequence[int]) -> torch.Tensor:
    """[tokens, width] what the head reads behind each token."""
    sizes = plan_cache(model.config, torch.float32, budget_bytes=2**24, page_size=64)
    pages = sizes.pages(len(ids))
    sizes = replace(sizes, num_units=sizes.units_per_slot + pages)
    cache = HybridCache(model.config, sizes, dtype=torch.float32, device=CPU)
    slot = list(range(sizes.units_per_slot))
    row = Row(token_ids=ids, context_len=0, slot=slot, pages=range(len(slot), len(slot) + pages))
    batch = build_batch([row], cache)
    return model(replace(batch, logit_rows=torch.arange(len(ids))), cache)
