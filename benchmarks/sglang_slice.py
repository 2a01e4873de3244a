"""SGLang's engine on a slice of K3 with random weights: what ``k3vl bench slice`` is compared with.

    python benchmarks/sglang_slice.py --model DIR [--output r.jsonl] [--wait] \
        [--prefill 1024,4096,16384,32768] [--decode 1,32] [--context 512]

DIR has the configuration of a slice, and no weights (``--load-format dummy``). What is timed is
what ``k3vl bench slice`` times: a prompt's arrival to its first token, and a step of decoding with
all requests in it; the latter is taken from the difference of two lengths, which leaves prefill
out. CUDA graphs, FlashMLA, Marlin and Triton's prefill, chunks of 8192: the best that runs on one
H200 without FlashAttention 3. Medians; the first runs of every shape compile and do not count.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

WARM_UP = 2
SHORT, LONG = 8, 72
"""New tokens of the two runs that decoding is the difference of."""


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
    import sglang
    import torch

    start = time.perf_counter()
    engine = sglang.Engine(**arguments(flags))
    print(json.dumps({"ready_seconds": round(time.perf_counter() - start, 1)}), flush=True)
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
