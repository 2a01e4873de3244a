"""The cache's own copies on a device: their numbers go up by copies that nobody waits for."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from k3vl.kernels.upload import upload
from k3vl.lm.cache import HybridCache, plan_cache
from k3vl.lm.packing import checkpoints_of, states_as
from tests.device_only import META, device_only
from tests.tiny import TINY


def test_arrays_go_up_together() -> None:
    got = upload([3, 1], [], range(4), [[1, 2], [3, 4]], 7, device=torch.device("cpu"))
    want = [[3, 1], [], [0, 1, 2, 3], [[1, 2], [3, 4]], 7]
    assert [part.tolist() for part in got] == want
    assert all(part.dtype == torch.int64 for part in got)
    assert len({part.untyped_storage().data_ptr() for part in got}) == 1


@pytest.mark.parametrize("packing", ["exact", "bfloat16", "int8"])
def test_states_and_features_move_without_a_wait(packing, monkeypatch) -> None:
    """The guard refuses every copy but :func:`upload`, which is taken as done."""

    def arrived(*values, device):
        return [torch.empty(np.shape(value), dtype=torch.int64, device=device) for value in values]

    monkeypatch.setattr("k3vl.lm.cache.upload", arrived)
    states = states_as(packing)
    sizes = plan_cache(TINY, torch.bfloat16, budget_bytes=2**20, page_size=16, states=states)
    cache = HybridCache(TINY, sizes, dtype=torch.bfloat16, device=META)
    checkpoints = checkpoints_of(cache, states, TINY.linear_attn_config.head_dim)
    slot, kept = range(sizes.units_per_slot), range(40, 40 + sizes.units_per_checkpoint)
    rows = torch.empty(sizes.feature_rows + 1, TINY.hidden_size, dtype=torch.bfloat16, device=META)
    with device_only():
        cache.clear(slot)
        checkpoints.save(slot, kept)
        checkpoints.load(kept, slot)
        cache.write_features([([30, 31], rows)])
        (some,) = cache.read_features([([30, 31], 1, 4)])
        assert some.shape == (3, TINY.hidden_size)
