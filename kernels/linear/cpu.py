"""Projections on a CPU: weights are read once for all rows, and no row depends on another."""

from __future__ import annotations

import torch

from k3vl.kernels.compiled import address, compiled, ints
from k3vl.kernels.linear import added, check_shapes
from k3vl.kernels.product import Table, Tables, matrix, product
from k3vl.kernels.weight import Rows, Weight


class LinearCPU:
    """See :func:`k3vl.kernels.linear.linear`; weights may be in pieces."""

    def __init__(self) -> None:
        """Nothing is known of any weight yet."""
        self._tables: Tables[Rows] = Tables(lambda weight: Table(matrix(weight)))

    def __call__(
        self,
        x: torch.Tensor,
        weight: Weight,
        *,
        onto: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """[N, D] -> [N, O]; all is float32."""
        check_shapes(x, weight, onto)
        assert dtype in {None, torch.float32}
        rows, outputs = x.shape[0], weight.shape[0]
        table = self._tables(weight) if isinstance(weight, Rows) else Table(matrix(weight))
        out = torch.empty(rows, outputs)
        _linear(address(x), x.stride(0), rows, table.address, out.data_ptr(), outputs)
        return added(out, onto)


@compiled
def _linear(x: int, x_stride: int, rows: int, table: int, out: int, outputs: int) -> None:
    product(x, x_stride, rows, ints(table, 1)[0], out, outputs)
