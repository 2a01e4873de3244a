"""The guard against host access catches what it is there for, and lets kernels pass."""

from __future__ import annotations

import pytest
import torch

from tests.device_only import META, HostAccessError, NoHostAccess, device_only

WAITS = {
    "item": lambda x, i: x.sum().item(),
    "int": lambda x, i: int(i[0]),
    "branch": lambda x, i: 1 if (x > 0).any() else 0,
    "nonzero": lambda x, i: (x > 0).nonzero(),
    "mask": lambda x, i: x[x > 0],
    "masked write": lambda x, i: x.masked_fill(x > 0, 1).index_put_((x > 0,), x.sum()),
    "masked_select": lambda x, i: x.masked_select(x > 0),
    "unique": lambda x, i: i.unique(),
    "repeat": lambda x, i: x.repeat_interleave(i, 0),
    "tensor": lambda x, i: x + torch.tensor([1.0, 2.0, 3.0], device=x.device),
    "where": lambda x, i: torch.where(x > 0, x, 0.0),
    "index list": lambda x, i: x[torch.tensor([0, 1])],
}


@pytest.mark.parametrize("what", WAITS)
def test_waiting_is_refused(what: str) -> None:
    x, i = torch.ones(3, 3, device=META), torch.ones(3, dtype=torch.int64, device=META)
    with device_only(), pytest.raises(HostAccessError):
        WAITS[what](x, i)
    x, i = torch.ones(3, 3), torch.ones(3, dtype=torch.int64)
    with NoHostAccess(), pytest.raises(HostAccessError):  # values change nothing
        WAITS[what](x, i)


@pytest.mark.parametrize("what", ["tolist", "cpu", "numpy"])
def test_values_cannot_leave_the_device(what: str) -> None:
    x = torch.ones(3, device=META)
    with (
        device_only(),
        pytest.raises((HostAccessError, NotImplementedError, RuntimeError, TypeError)),
    ):
        getattr(x, what)()


def test_a_copy_from_the_host_is_refused() -> None:
    host, x = torch.ones(3), torch.ones(3, device=META)
    for copy in (lambda: x.copy_(host), lambda: host.to(META), lambda: x + host):
        with device_only(), pytest.raises(HostAccessError, match="goes between"):
            copy()


def test_what_stays_on_the_device_passes() -> None:
    x, i = torch.ones(3, 4, device=META), torch.arange(3, device=META)
    scalar = torch.tensor(2.0)  # an argument of the kernel, nothing is copied
    with device_only() as launches:
        y = (x @ x.T).softmax(-1).sort(descending=True, stable=True).values * scalar
        x[i] = x * 2
        torch.searchsorted(y, y[:, :1].contiguous()).clamp_(max=2)
    assert launches == []


def test_launches_are_recorded() -> None:
    pytest.importorskip("triton")
    from k3vl.kernels.attn_residual.gpu import attn_residual

    rows, weights = torch.ones(2, 5, 16, device=META), torch.ones(16, device=META)
    with device_only() as launches:
        out = attn_residual(rows, weights, weights, 1e-5)
        with pytest.raises(HostAccessError, match="attn_residual_kernel gets tensors on cpu"):
            attn_residual(rows, torch.ones(16), weights, 1e-5)
    assert out.shape == (5, 16)
    assert [(launch.kernel, launch.grid) for launch in launches] == [("attn_residual_kernel", (5,))]
