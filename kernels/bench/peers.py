"""SGLang's own kernels for the work of the cases, where it is installed.

Written against the modules and layouts of SGLang 0.5.17, the first release that serves Kimi K3.
Nothing of it is imported before a peer's turn comes. Its kernels are called as its K3 model and
attention backends call them on Hopper, with the same arguments; what a server computes once per
step for all layers (page tables, split counts) is prepared before. Each result is compared with
ours by the caller, so that a peer that was wired wrongly is seen.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import TYPE_CHECKING

from k3vl.kernels.bench.case import Peer, Work

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def named(peers: Mapping[str, Callable[[], Work]]) -> dict[str, Peer]:
    """Peers under SGLang's name and version; none where it is not installed."""
    if find_spec("sglang") is None:
        return {}
    try:
        release = f"SGLang {version('sglang')}"
    except PackageNotFoundError:  # a bare folder on the path
        release = "SGLang"
    return {f"{release} {name}": Peer(prepare) for name, prepare in peers.items()}
