"""Matrix products on a CPU: blocks of every shape, 8-bit weights as stored, wide KDA states."""

from __future__ import annotations

import gc

import pytest
import torch
from numba import njit

from k3vl.errors import ShapeError
from k3vl.kernels.int8 import Int8Weight, dequantize_int8, quantize_int8
from k3vl.kernels.kda import KDAWeights, kda_decode
from k3vl.kernels.kda.cpu import kda_decode_cpu
from k3vl.kernels.linear.cpu import LinearCPU
from k3vl.kernels.tile import block, decode
from k3vl.kernels.weight import KeptCodes, Rows
from tests.kernels.test_cpu import columns, normal, relative_error

pytestmark = pytest.mark.usefixtures("poisoned_memory")

LINEAR = LinearCPU()


def stored(outputs: int, inner: int, group: int, seed: int = 0) -> tuple[Int8Weight, torch.Tensor]:
    """A weight in 8 bits, and decoded."""
    codes, scales = quantize_int8(normal(outputs, inner, seed=seed), group)
    decoded = dequantize_int8(codes, scales, dtype=torch.float32)
    return Int8Weight(codes, scales.float()), decoded


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 5, 8, 23])
@pytest.mark.parametrize(
    ("inner", "outputs", "group"), [(16, 1, 16), (48, 7, 16), (64, 9, 64), (1024, 33, 256)]
)
def test_codes_give_the_bits_of_decoded_weights(
    rows: int, inner: int, outputs: int, group: int
) -> None:
    weight, decoded = stored(outputs, inner, group)
    x = columns(normal(rows, inner))
    assert torch.equal(LINEAR(x, Rows((weight,))), LINEAR(x, decoded))


@pytest.mark.parametrize("rows", [1, 3, 6])
def test_pieces_are_rows_of_one_matrix(rows: int) -> None:
    first, decoded = stored(20, 32, 32)
    floating = normal(3, 32)
    last, decoded_last = stored(5, 32, 16, seed=1)
    weight, x = Rows((first, floating, last)), normal(rows, 32)
    assert weight.shape == (28, 32)
    together = torch.cat([decoded, floating, decoded_last])
    assert torch.equal(weight.decoded(torch.float32), together)
    assert torch.equal(LINEAR(x, weight), LINEAR(x, together))
    with pytest.raises(ShapeError, match=r"rows of 2 pieces, \[16, 32\] columns"):
        Rows((first, normal(3, 16)))


def run(made, rows: int, outputs: int):
    @njit
    def once(x: int, w: int, inner: int, y: int) -> None:
        made(x, 4 * inner, w, 4 * inner, inner, 0, 0, y, 4 * outputs)

    def multiply(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = torch.empty(rows, outputs)
        once(x.data_ptr(), w.data_ptr(), x.shape[1], y.data_ptr())
        return y

    return multiply


@pytest.mark.parametrize("lanes", [4, 8, 16])
def test_no_bit_depends_on_the_shape_of_a_block(lanes: int) -> None:
    """For the registers of every kind of processor, whole vectors and not."""
    shapes = [(4, 4), (4, 2), (4, 1), (1, 8), (1, 1)]
    made = {shape: run(block(*shape, coded=False, lanes=lanes), *shape) for shape in shapes}
    for inner in (1, 3, lanes, 2 * lanes + 3, 300):
        x, w = normal(4, inner), normal(8, inner, seed=1)
        single = torch.cat(
            [
                torch.cat([made[1, 1](x[r : r + 1], w[j : j + 1]) for j in range(8)], 1)
                for r in range(4)
            ]
        )
        assert relative_error(single, x.double() @ w.double().t()) < 1e-6
        for (rows, outputs), multiply in made.items():
            got = multiply(x[:rows].contiguous(), w[:outputs].contiguous())
            assert torch.equal(got, single[:rows, :outputs])


def test_decoding_to_memory_is_decoding() -> None:
    @njit
    def once(codes: int, scale: int, count: int, out: int) -> None:
        decode(codes, scale, count, out)

    weight, want = stored(1, 64, 64)
    out = torch.empty(1, 80)
    once(weight.codes.data_ptr(), weight.scales.data_ptr(), 64, out.data_ptr())
    assert torch.equal(out[:, :64], want)
    assert out[:, 64:].isnan().all()


def test_only_floating_rows_stay_in_a_parameter() -> None:
    parameter = torch.nn.Parameter(normal(12, 32), requires_grad=False)
    floating, (weight, decoded) = parameter[5:].clone(), stored(5, 32, 32)
    kept = KeptCodes()
    kept.taker(parameter[:5])(weight.codes, weight.scales.half())
    found = kept.matrix(parameter)
    assert isinstance(found, Rows)
    rest = found.pieces[1]
    assert isinstance(rest, torch.Tensor)
    assert torch.equal(found.decoded(torch.float32)[:5], decoded)
    assert torch.equal(parameter, floating)
    assert parameter.shape == (7, 32)
    assert rest.data_ptr() == parameter.data_ptr()
    untouched = torch.nn.Parameter(normal(2, 3), requires_grad=False)
    assert kept.matrix(untouched) is untouched


def test_experts_are_kept_one_by_one() -> None:
    experts = torch.nn.Parameter(normal(3, 4, 16), requires_grad=False)
    before, (weight, decoded) = experts.clone(), stored(2, 16, 16)
    kept = KeptCodes()
    kept.taker(experts[1, 2:])(weight.codes, weight.scales)
    found = kept.matrices(experts)
    assert isinstance(found, tuple)
    assert torch.equal(found[0].decoded(torch.float32), before[0])
    assert torch.equal(found[1].decoded(torch.float32), torch.cat([before[1, :2], decoded]))
    assert torch.equal(found[2].decoded(torch.float32), before[2])
    assert experts.shape == (10, 16)


def test_a_table_goes_with_its_weight() -> None:
    """Also where what the weight points to is still in use."""
    op, (piece, _) = LinearCPU(), stored(8, 16, 16)
    weight = Rows((piece,))
    op(normal(1, 16), weight)
    assert len(op._tables._made) == 1
    del weight
    gc.collect()
    assert len(op._tables._made) == 0


@pytest.mark.parametrize("head", [64, 80, 128])
def test_wide_kda_states_stay_in_registers(head: int) -> None:
    """Columns of the state by vectors of 64, and those behind the last whole one."""
    heads, batch = 2, 3
    inner = heads * head
    weights = KDAWeights(
        conv=normal(3 * inner, 4),
        a_log=normal(heads),
        dt_bias=normal(inner),
        o_norm=normal(head),
        eps=1e-5,
        lower_bound=-5.0,
    )
    rows = [normal(batch, width, seed=1) for width in (3 * inner, inner, inner, heads)]
    windows, states = normal(7, 3, 3, head), normal(7, head, head)
    cells = torch.tensor([[0, 3], [5, 1], [2, 6]])
    wants = windows.clone(), states.clone()
    want = kda_decode(*rows, weights, *wants, cells)
    got = kda_decode_cpu(*rows, weights, windows, states, cells)
    assert relative_error(got, want.double()) < 1e-5
    assert relative_error(states, wants[1].double()) < 1e-5
    assert torch.equal(states[4], wants[1][4])
