"""SGLang's engine on a slice of K3 with random weights: what ``k3vl bench slice`` is compared with.

    python benchmarks/sglang_slice.py --model DIR [--output r.jsonl] [--wait] \
        [--prefill 1024,4096,16384,32768] [--decode 1,32] [--context 512]

DIR has the configuration of a slice, and no weights (``--load-format dummy``). What is timed is
what ``k3vl bench slice`` times: a prompt's arrival to its first token, and a step of decoding with
all requests in it; the latter is taken from the difference of two lengths, which leaves prefill
out. CUDA graphs, FlashMLA, Marlin and Triton's prefill, chunks of 8192: the best that runs on one
H200 without FlashAttention 3. Medians; the first runs of every shape compile and do not count.

SGLang's dummy weights lie within 0.001 of zero, norms and routers too, and experts in 4 bits are
all zeros: every token then goes to the 16 experts with the largest choice bias, and 32 tokens read
the weights of 16 experts in place of 383. So the process that makes the model draws its weights as
``k3vl.synthetic.random_model`` does, before SGLang rearranges them; every line says how many
experts of a layer the last 32 tokens of a prompt went to.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import nn

WARM_UP = 2
SHORT, LONG = 8, 72
"""New tokens of the two runs that decoding is the difference of."""
FOLDER = "SGLANG_SLICE_FOLDER"
"""Names a folder in which processes tell each other: ``drawn`` when weights have been, ``listen``
from when on choices of experts are to be written down in ``chosen``."""
NOTED, TOKENS = 8, 32


# ------------------------------------------------------------------ in the process with the model


def scheduler_process(*args: Any, **kwargs: Any) -> None:
    """SGLang's own, with other dummy weights."""
    from sglang.srt.managers.scheduler import run_scheduler_process
    from sglang.srt.model_loader import loader

    loader.initialize_dummy_weights = draw
    run_scheduler_process(*args, **kwargs)


@torch.no_grad()
def draw(model: nn.Module, *_: Any, **__: Any) -> None:
    """Fill a model as SGLang has allocated it, with names and shapes of before rearranging."""
    folder = Path(os.environ[FOLDER])
    count = 0
    for at, (name, parameter) in enumerate(model.state_dict().items()):
        generator = torch.Generator(parameter.device).manual_seed(at)
        count += draw_one(name, parameter, generator)
    for module in model.modules():
        if type(module).__name__ == "TopK":
            module.register_forward_hook(Listener(folder))
    (folder / "drawn").write_text(str(count))


def draw_one(name: str, parameter: torch.Tensor, generator: torch.Generator) -> bool:
    """Draw one tensor by its name; whether it is one of weights.

    Matrices keep the scale of what goes through them, norms are near one, 4-bit codes are uniform
    and their scales make them a matrix as the others. See ``k3vl/synthetic.py``.
    """
    if parameter.dtype == torch.uint8:
        if name.endswith("_scale"):
            middle = round(127 - math.log2(68.5 / 8 * 32 * parameter.shape[-1]) / 2)
            parameter.random_(middle - 1, middle + 2, generator=generator)
        else:
            parameter.random_(0, 256, generator=generator)
        return True
    if not parameter.is_floating_point() or parameter.element_size() < 2:
        return False
    if name.endswith("_weight_bias"):  # of experts: K3 has none, SGLang adds them
        parameter.zero_()
    elif name.removesuffix(".weight").endswith("norm"):
        parameter.normal_(1, 0.1, generator=generator)
    elif name.endswith("bias"):
        parameter.normal_(0, 0.01, generator=generator)
    else:
        spread = 1 / math.sqrt(parameter.shape[-1]) if parameter.dim() > 1 else 0.3
        parameter.normal_(0, spread, generator=generator)
    return True


class Listener:
    """Writes down how many experts the last tokens of a batch went to, the first few times."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.left = folder, NOTED

    def __call__(self, module: nn.Module, given: Any, out: Any) -> None:
        """A forward hook of the layer that chooses."""
        ids = getattr(out, "topk_ids", None)
        if not self.left or ids is None or len(ids) < TOKENS:
            return
        if ids.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        if (self.folder / "listen").exists():
            self.left -= 1
            with (self.folder / "chosen").open("a", encoding="utf-8") as file:
                file.write(f"{ids[-TOKENS:].unique().numel()}\n")


def chosen(folder: Path) -> float | None:
    """Experts of a layer that so many tokens went to, by what was written down."""
    path = folder / "chosen"
    counts = path.read_text(encoding="utf-8").split() if path.exists() else ()
    return statistics.median(map(int, counts)) if counts else None


# ------------------------------------------------------------------ in the process that asks


def numbers(text: str) -> list[int]:
    return [int(field) for field in text.split(",") if field]


def arguments(flags: argparse.Namespace) -> dict[str, Any]:
    """Fields of SGLang's ``ServerArgs``."""
    return {
        "model_path": flags.model,
        "trust_remote_code": True,
        "load_format": "dummy",
        "dtype": "bfloat16",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "skip_server_warmup": True,
        "disable_radix_cache": True,
        "mem_fraction_static": flags.memory,
        "prefill_attention_backend": "triton",
        "decode_attention_backend": "flashmla",
        "moe_runner_backend": "marlin",
        "chunked_prefill_size": 8192,
        "max_running_requests": max(flags.decode),
        "context_length": max(*flags.prefill, flags.context + LONG) + 64,
        "cuda_graph_bs_decode": flags.decode,
        "log_level": "info",  # what it chose, and where its time goes
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--prefill", type=numbers, default=[1024, 4096, 16384, 32768])
    parser.add_argument("--decode", type=numbers, default=[1, 32])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--memory", type=float, default=0.85)
    parser.add_argument("--wait", action="store_true", help="measure after a line of input")
    parser.add_argument("--output", type=Path, help="append JSON lines here")
    flags = parser.parse_args()
    from sglang.srt.entrypoints.engine import Engine

    class Drawn(Engine):
        """SGLang's engine, its model filled by :func:`draw`."""

        run_scheduler_process_func = staticmethod(scheduler_process)

    folder = Path(tempfile.mkdtemp())
    os.environ[FOLDER] = str(folder)
    start = time.perf_counter()
    engine = Drawn(**arguments(flags))
    if not (folder / "drawn").exists():
        engine.shutdown()
        raise SystemExit(
            "SGLang has made a model without asking for weights: nothing is comparable"
        )
    print(json.dumps({"ready_seconds": round(time.perf_counter() - start, 1)}), flush=True)
    (folder / "listen").touch()
    if flags.wait:
        sys.stdin.readline()
    about = {
        "sglang": version("sglang"),
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name(),
        "model": Path(flags.model).name,
    }
    chance = random.Random(0)

    def seconds(requests: int, length: int, new: int) -> float:
        ids = [[chance.randrange(256) for _ in range(length)] for _ in range(requests)]
        sampling = {"max_new_tokens": new, "temperature": 0, "ignore_eos": True}
        begin = time.perf_counter()
        engine.generate(input_ids=ids, sampling_params=sampling)
        return time.perf_counter() - begin

    def runs(requests: int, length: int, new: int) -> list[float]:
        return [seconds(requests, length, new) for _ in range(WARM_UP + flags.repeat)][WARM_UP:]

    def tell(**line: Any) -> None:
        line[f"experts_of_{TOKENS}_tokens"] = chosen(folder)
        print(json.dumps(line), flush=True)
        if flags.output:
            with flags.output.open("a", encoding="utf-8") as file:
                file.write(json.dumps({**about, **line}) + "\n")

    for batch in flags.decode:
        short, long = (runs(batch, flags.context, new) for new in (SHORT, LONG))
        step = (statistics.median(long) - statistics.median(short)) / (LONG - SHORT)
        tell(op="slice_decode", batch=batch, median_ms=1e3 * step, short=short, long=long)
    for length in flags.prefill:  # from the shortest: what a limit on time cuts is the longest
        taken = runs(1, length, 1)
        tell(
            op="slice_prefill", tokens=length, median_ms=1e3 * statistics.median(taken), runs=taken
        )
    engine.shutdown()


if __name__ == "__main__":
    main()
