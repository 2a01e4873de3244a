"""Bodies of requests leave nothing behind: what was freed is the system's again."""

import subprocess
import sys

import pytest

CHECK = """
import psutil
from k3vl.app.memory import return_large_blocks
{call}
size = 8 * 2**20
first = bytearray(b"x") * size
del first  # without the call glibc now keeps blocks of this size in its heap
process = psutil.Process()
before = process.memory_info().rss
blocks = [bytearray(b"x") * size for _ in range(4)]
last = bytearray(b"x") * size  # holds the top of the heap
del blocks
print(process.memory_info().rss - before - size)
"""


def left(call: str) -> int:
    """Bytes that 32 MiB of freed blocks still take."""
    code = CHECK.format(call=call)
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="of glibc")
def test_large_blocks_go_back() -> None:
    assert left("return_large_blocks()") < 2**20
