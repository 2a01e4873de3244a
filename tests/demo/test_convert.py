import pytest
import torch

from k3vl.demo.convert import entries, from_k3, to_k3
from k3vl.demo.train_model import DemoModel
from k3vl.errors import WeightError


@pytest.fixture(scope="module")
def state():
    torch.manual_seed(0)
    return DemoModel(3).model_state()


def test_both_directions_are_inverse(state):
    tensors = to_k3(state)
    back = from_k3(tensors)
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], value) for name, value in state.items())


def test_every_value_has_one_place(state):
    tensors = to_k3(state)
    padding = 9 * 60  # A_log is stored 64 long, one value a head
    assert sum(t.numel() for t in tensors.values()) - padding == sum(
        t.numel() for t in state.values()
    )
    assert len({entry.name for entry in entries()}) == len(tensors)


def test_stored_tail_of_a_log_is_ignored(state):
    tensors = to_k3(state)
    name = "language_model.model.layers.0.self_attn.A_log"
    assert tensors[name].shape == (64,)
    tensors[name][4:] = float("nan")
    assert torch.equal(from_k3(tensors)["layers.0.attn.A_log"], state["layers.0.attn.A_log"])


def test_missing_left_over_and_misshapen_tensors_are_named(state):
    tensors = to_k3(state)
    first, *_ = tensors
    with pytest.raises(WeightError, match=f"{first} is missing"):
        from_k3({name: t for name, t in tensors.items() if name != first})
    with pytest.raises(WeightError, match="stray is not part"):
        from_k3(tensors | {"stray": torch.zeros(1)})
    with pytest.raises(WeightError, match=r"shape \(2,\), expected"):
        from_k3(tensors | {first: torch.zeros(2)})
