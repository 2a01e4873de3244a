"""Run Gluon kernels for Hopper on a CPU, where Triton has no interpreter for them.

What is asynchronous happens as late as it may, and until then nobody may rely on it: a copy leaves
NaN in its target until somebody waits for its barrier, and a product reads its operands only when
it is waited for, each after those that its group began before. Warp groups are threads that meet at
barriers alone, and are held up at random. Where a launch asks for it, every access of shared memory
has to be ordered by barriers, whatever came first (``ordering.py``). What else depends on the order
of warps inside a group, or on layouts, this cannot show. Machine code runs on an imitation of its
instructions (``ptx_lanes_on_cpu.py``).
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from types import FunctionType, ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from triton.language import constexpr

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

from tests.kernels.memory_on_cpu import (
    Barrier,
    Barriers,
    Descriptor,
    Product,
    Shared,
    _meeting,
)
from tests.kernels.ordering import Cell, Clock, Group, become, group
from tests.kernels.pointers_on_cpu import Pointer
from tests.kernels.ptx_lanes_on_cpu import run_ptx, signed

PATIENCE = 20.0
"""Seconds until a wait counts as a deadlock."""

GARBAGE = 0x2AAAAAAA
"""In memory of whole numbers that nobody has written to."""

_failed = threading.Event()
"""A warp group has ended with an error: nobody waits for it any more."""
_mine = threading.local()
"""Of a group of warps: ``products`` under way, in the order in which they end."""


class _Language(ModuleType):
    """Stands for ``triton.experimental.gluon.language``; one per program of a launch."""

    int32, int64 = torch.int32, torch.int64
    float32, bfloat16, float16 = torch.float32, torch.bfloat16, torch.float16
    exp2, log2 = staticmethod(torch.exp2), staticmethod(torch.log2)
    exp, log = staticmethod(torch.exp), staticmethod(torch.log)
    abs, rsqrt = staticmethod(torch.abs), staticmethod(torch.rsqrt)
    reshape, zeros_like = staticmethod(torch.reshape), staticmethod(torch.zeros_like)
    join = staticmethod(lambda a, b: torch.stack([a, b], -1))
    fma = staticmethod(lambda a, b, c: a * b + c)
    static_range = range

    def __init__(self, program: tuple[int, ...], grid: tuple[int, ...]) -> None:
        super().__init__("gl")
        self.program, self.grid = program, grid

    def program_id(self, axis: int) -> torch.Tensor:
        return torch.tensor(self.program[axis], dtype=torch.int32)

    def num_programs(self, axis: int) -> int:
        return self.grid[axis]

    def __getattr__(self, name: str) -> Any:
        if name.endswith("Layout") or name == "constexpr":
            return lambda *_: None
        raise AttributeError(name)

    @staticmethod
    def cdiv(a: Any, b: Any) -> Any:
        return (a + b - 1) // b

    @staticmethod
    def maximum(a: Any, b: Any) -> torch.Tensor:
        return torch.maximum(torch.as_tensor(a), torch.as_tensor(b))

    @staticmethod
    def minimum(a: Any, b: Any) -> torch.Tensor:
        return torch.minimum(torch.as_tensor(a), torch.as_tensor(b))

    @staticmethod
    def arange(start: int, end: int, _layout: Any) -> torch.Tensor:
        return torch.arange(start, end, dtype=torch.int32)

    @staticmethod
    def full(shape: list[int], value: float, dtype: torch.dtype, _layout: Any) -> torch.Tensor:
        return torch.full(shape, value, dtype=dtype)

    @staticmethod
    def zeros(shape: list[int], dtype: torch.dtype, _layout: Any) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    @staticmethod
    def where(condition: Any, a: Any, b: Any) -> torch.Tensor:
        return torch.where(torch.as_tensor(condition), torch.as_tensor(a), torch.as_tensor(b))

    @staticmethod
    def split(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.unbind(-1)

    @staticmethod
    def max(x: torch.Tensor, axis: int) -> torch.Tensor:
        return x.amax(axis)

    @staticmethod
    def min(x: torch.Tensor, axis: int) -> torch.Tensor:
        return x.amin(axis)

    @staticmethod
    def sum(x: torch.Tensor, axis: int) -> torch.Tensor:
        return x.sum(axis)

    @staticmethod
    def convert_layout(x: torch.Tensor, _layout: Any) -> torch.Tensor:
        return x

    @staticmethod
    def load(
        at: Pointer, mask: Any = None, other: float = 0.0, cache_modifier: str = ""
    ) -> torch.Tensor:
        flat, where, live = at.cells(mask)
        return torch.where(live, flat[where.long()], torch.tensor(other, dtype=flat.dtype))

    @staticmethod
    def store(at: Pointer, value: torch.Tensor, mask: Any = None, cache_modifier: str = "") -> None:
        flat, where, live = at.cells(mask)
        value = torch.tensor(value, dtype=flat.dtype) if isinstance(value, int) else value
        assert value.dtype == flat.dtype
        flat[where[live].long()] = value.expand(where.shape)[live]

    broadcast = staticmethod(torch.broadcast_tensors)

    @staticmethod
    def inline_asm_elementwise(
        code: Any,
        constraints: Any,
        args: list[Any],
        *,
        dtype: torch.dtype,
        is_pure: bool,
        pack: int,
    ) -> torch.Tensor | None:
        """Every row of [threads, pack] is a thread's; what controls a launch or a cache is left."""
        text, kinds = (getattr(x, "value", x) for x in (code, constraints))
        if not is_pure:
            return None
        assert all(x.shape[1] == pack for x in args)
        registers = [x[:, i] for x in args for i in range(pack)]
        assert [kind[0] for kind in kinds.split(",")].count("=") == pack
        assert len(kinds.split(",")) == pack + len(registers)
        bits = (x if x.dtype == torch.float32 else x.long() & 0xFFFFFFFF for x in registers)
        got = run_ptx(text, dict(enumerate(bits, pack)))
        out = torch.stack([got[f"${i}"] for i in range(pack)], 1)
        return out if dtype == torch.float32 else signed(out)

    @staticmethod
    def allocate_shared_memory(dtype: torch.dtype, shape: list[int], _layout: Any) -> Any:
        if dtype == torch.int64:
            return Barriers(shape[0])
        room = torch.empty(shape, dtype=dtype)
        cells = [Cell(f"{dtype} {shape}, part {i}") for i in range(shape[0])]
        return Shared(room.fill_(float("nan") if dtype.is_floating_point else GARBAGE), cells)

    @staticmethod
    def warp_specialize(groups: list[Any], _warps: list[int], _registers: list[int]) -> None:
        failures: list[BaseException] = []
        parent = group()
        if parent:
            parent.meet()

        def work(number: int, function: Any, args: tuple[Any, ...]) -> None:
            known = parent and parent.clocks[parent.first]
            become(Group(f"group {number}", known) if parent else None)
            try:
                function(*args)
            except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
                failures.append(error)
                with _meeting:
                    _failed.set()
                    _meeting.notify_all()

        threads = [
            threading.Thread(target=work, args=(number, *one)) for number, one in enumerate(groups)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]


class _Copies:
    """A program's copies to shared memory by its threads, done when their group is waited for."""

    def __init__(self) -> None:
        self.begun: list[tuple[Shared, torch.Tensor]] = []
        self.groups: list[list[tuple[Shared, torch.Tensor]]] = []

    def begin(
        self, target: Shared, at: Pointer, mask: Any = None, cache_modifier: str = ""
    ) -> None:
        block = _Language.load(at, mask, GARBAGE)
        target.store(torch.full_like(block, GARBAGE))
        self.begun.append((target, block))

    def commit(self) -> None:
        self.groups.append(self.begun)
        self.begun = []

    def wait(self, outstanding: int) -> None:
        done, self.groups = self.groups[: -outstanding or None], self.groups[-outstanding:]
        if not outstanding:
            self.groups = []
        for target, block in (copy for several in done for copy in several):
            target.store(block)


class _Stores:
    """Copies out of shared memory: made when they are waited for, and all have to be."""

    def __init__(self) -> None:
        self.begun: list[tuple[Descriptor, list[Any], Shared]] = []

    def begin(self, target: Descriptor, at: list[Any], source: Shared) -> None:
        assert source.tensor.shape == target.block
        with _meeting:
            if one := group():
                for cell in source.cells:
                    cell.begin_product(one)
        self.begun.append((target, at, source))

    def wait(self, outstanding: int) -> None:
        while len(self.begun) > outstanding:
            target, at, source = self.begun.pop(0)
            target.write(source.tensor, *(int(x) for x in at))
            with _meeting:
                if one := group():
                    now = one.tick()
                    for cell in source.cells:
                        cell.end_product(now)


class _OfTriton:
    """Of ``triton.language`` what functions of it use that Gluon kernels call."""

    PropagateNan = SimpleNamespace(ALL=None)
    exp = staticmethod(torch.exp)

    @staticmethod
    def range(start: Any, end: int, step: int, *, disable_licm: bool) -> Iterator[torch.Tensor]:
        for i in range(int(start), end, step):
            yield torch.tensor(i, dtype=torch.int32)

    @staticmethod
    def minimum(a: torch.Tensor, b: float, _nan: None) -> torch.Tensor:
        return torch.minimum(a, torch.tensor(b))


def _init(barrier: Barrier, count: int) -> None:
    barrier.count = barrier.missing = count


def _expect(barrier: Barrier, size: int, pred: Any = True) -> None:
    if pred:
        with _meeting:
            _tell(barrier)
            barrier.change(expected=size)
            barrier.change(arrived=1)


def _arrive(barrier: Barrier, count: int, pred: Any = True) -> None:
    time.sleep(random.choice((0, 0, 1e-3)))
    if pred:
        with _meeting:
            _tell(barrier)
            barrier.change(arrived=count)


def _tell(barrier: Barrier) -> None:
    if one := group():
        barrier.coming |= one.tells()


def _wait(barrier: Barrier, phase: Any) -> None:
    time.sleep(random.choice((0, 0, 1e-3)))
    with _meeting:
        passed = _meeting.wait_for(lambda: _failed.is_set() or barrier.passed(int(phase)), PATIENCE)
        assert passed, "nobody came"
        assert not _failed.is_set(), "another group has failed"
        if one := group():
            one.learn(barrier.told)


def _copy(
    source: Descriptor, at: list[Any], barrier: Barrier, target: Shared, pred: Any = True
) -> None:
    if pred:
        assert target.tensor.shape == source.block
        block = source.read(*(int(x) for x in at))
        with _meeting:
            told: Clock = Clock()
            if one := group():
                for cell in target.cells:
                    told |= cell.copy(one)
            target.tensor.fill_(float("nan"))
            barrier.copies.append((target, block, told))
            _meeting.notify_all()


def _product(a: Any, b: Shared, c: Any, *, use_acc: bool = True, is_async: bool = False) -> Any:
    product = Product(a, b, c, add=use_acc)
    if not is_async:
        return product.end()
    _mine.__dict__.setdefault("products", []).append(product)
    return product


def _finish(outstanding: int, deps: list[Product]) -> Any:
    under_way = _mine.__dict__.setdefault("products", [])
    while len(under_way) > outstanding:
        under_way.pop(0).end()
    assert all(product.done is not None for product in deps), "a product that may not be done"
    values = tuple(product.value() for product in deps)
    return values[0] if len(values) == 1 else values


class _Turns:
    """Barriers by number that two groups share: one gives, the other takes, in turns."""

    def __init__(self) -> None:
        self.given: dict[int, int] = {}

    def give(self, name: int) -> None:
        with _meeting:
            self.given[name] = self.given.get(name, 0) + 1
            assert self.given[name] == 1, "more arrivals than were announced"
            _meeting.notify_all()

    def take(self, name: int) -> None:
        time.sleep(random.choice((0, 0, 1e-3)))
        with _meeting:
            _meeting.wait_for(lambda: _failed.is_set() or self.given.get(name), PATIENCE)
            assert self.given.pop(name, 0), "nobody came"


def _meet() -> None:
    if one := group():
        one.meet()


def _fence() -> None:
    with _meeting:
        if one := group():
            one.fence()


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    *args: Any,
    stand_ins: Mapping[str, Any] | None = None,
    ordered: bool = False,
    **constants: Any,
) -> None:
    """Run ``kernel`` for every program of ``grid``, one after another.

    Tensors become pointers; :class:`Descriptor` stands for descriptors of blocks, ``stand_ins`` for
    the kernel's helpers in machine language, by name. ``ordered``: the order of all accesses of
    shared memory is checked.
    """
    scope = {
        name: value.value if isinstance(value, constexpr) else value
        for name, value in kernel.fn.__globals__.items()
    }
    pointers = [Pointer(x) if isinstance(x, torch.Tensor) else x for x in args]
    for program in itertools.product(*(range(size) for size in grid)):
        copies, stores, turns = _Copies(), _Stores(), _Turns()
        _failed.clear()
        become(Group("all") if ordered else None)
        names = {
            **scope,
            "gl": _Language(program, grid),
            "mbarrier": SimpleNamespace(
                init=_init, expect=_expect, arrive=_arrive, wait=_wait, MBarrierLayout=lambda: None
            ),
            "begin_copy": _copy,
            "begin_store": stores.begin,
            "wait_for_stores": stores.wait,
            "narrow": lambda x: x.to(torch.bfloat16),
            "tanh": torch.tanh,
            "meet": _meet,
            "take_turn": turns.take,
            "give_turn": turns.give,
            "fence_async_shared": _fence,
            "widen": lambda x: x.float(),
            "widen_pairs": lambda x, _layout: x.view(torch.bfloat16).float(),
            "reciprocal": lambda x: 1 / x,
            "rounded_product": torch.mul,
            "warpgroup_mma": _product,
            "warpgroup_mma_wait": _finish,
            "tl": _OfTriton,
            "async_copy_global_to_shared": copies.begin,
            "commit_group": copies.commit,
            "wait_group": copies.wait,
        }
        for name, value in scope.items():
            if isinstance(getattr(value, "fn", None), FunctionType) and names[name] is value:
                names[name] = FunctionType(value.fn.__code__, names, name)
        names.update(stand_ins or {})
        names[kernel.fn.__name__](*pointers, **constants)
        assert not any(turns.given.values()), "a turn that nobody takes"
        assert not stores.begun, "a program has ended before its copies"
