"""Whether code keeps a CUDA device fed: no host read, no unpinned copy, no wait; runs on a CPU.

Tensors on the ``meta`` device stand for the device's: they have shapes and no values, so whatever
needs a value fails. Under :func:`device_only` what would wait for a stream fails by name, and
Triton kernels are recorded, not launched: the code around them is the true one.

    with device_only() as launches:
        model(batch, cache)  # all on "meta"
    assert [launch.kernel for launch in launches] == ["kda_step_kernel", ...]
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from collections.abc import Iterator

META = torch.device("meta")

_WAITS = frozenset(
    {
        "_local_scalar_dense", "item", "is_nonzero", "equal", "allclose",
        "nonzero", "nonzero_numpy", "argwhere", "masked_select", "bincount", "histc",
        "_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive",
    }
)  # fmt: skip
"""Operators whose result's size or whose caller needs values on the host."""


class HostAccessError(Exception):
    """An operator would make the host wait for the device, or feed it from pageable memory."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A Triton kernel that was not launched; the function and what it would have been given."""

    kernel: str
    grid: tuple[int, ...]
    function: Any = field(compare=False, repr=False)
    args: tuple[Any, ...] = field(compare=False, repr=False)
    options: dict[str, Any] = field(compare=False, repr=False)


class NoHostAccess(TorchDispatchMode):
    """Refuses every operator that waits, by name; on any device, so for CPU tensors too."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if name in _WAITS or (name == "repeat_interleave" and kwargs.get("output_size") is None):
            raise HostAccessError(f"{func} waits for the device")
        if name == "lift_fresh":
            raise HostAccessError("torch.tensor copies from pageable memory")
        if name == "where" and not all(isinstance(x, torch.Tensor) and x.dim() for x in args):
            raise HostAccessError("torch.where copies a scalar to the device; masked_fill does not")
        if name in {"index", "index_put", "index_put_", "_index_put_impl_"}:
            masks = [i for i in args[1] if i is not None and i.dtype in {torch.bool, torch.uint8}]
            if masks:
                raise HostAccessError(f"{func} with a mask waits for its count")
        # A CPU scalar beside device tensors is an argument of the kernel, nothing is copied.
        devices = {x.device for x in given if x.dim()} | {x.device for x in given[:1]}
        _require_one(func, devices)
        out = func(*args, **kwargs)
        _require_one(
            func, devices | {x.device for x in tree_leaves(out) if isinstance(x, torch.Tensor)}
        )
        return out


class _NoHostData(TorchFunctionMode):
    """Refuses tensors made of Python values: for "meta" torch does not dispatch their copy."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in {torch.tensor, torch.as_tensor, torch.asarray}:
            raise HostAccessError(f"torch.{func.__name__} copies from pageable memory")
        return func(*args, **(kwargs or {}))


def _require_one(func: object, devices: set[torch.device]) -> None:
    if len(devices) > 1:
        raise HostAccessError(f"{func} goes between {', '.join(sorted(map(str, devices)))}")


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Record Triton launches in place of doing them; not for the interpreter's process."""
    from triton.runtime.jit import JITFunction

    launches: list[Launch] = []

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        assert not warmup
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
        strangers = {str(x.device) for x in tensors} - {"meta"}
        if strangers:
            raise HostAccessError(f"{self.__name__} gets tensors on {', '.join(strangers)}")
        launches.append(Launch(self.__name__, tuple(grid), self, args, kwargs))

    launched, JITFunction.run = JITFunction.run, run
    try:
        yield launches
    finally:
        JITFunction.run = launched


@contextmanager
def device_only() -> Iterator[list[Launch]]:
    """As :func:`recorded`, and refuse host access."""
    with recorded() as launches, _NoHostData(), NoHostAccess():
        yield launches
