"""Fixtures shared by the whole suite."""

from __future__ import annotations

import contextlib
import signal
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

with contextlib.suppress(ImportError):  # SGLang's environment has none, and needs none
    from hypothesis import HealthCheck, settings

    # A busy machine is slow now and then, and a suite that has passed passes again.
    settings.register_profile(
        "suite", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("suite")


# What a shell starts in the background ignores interrupts, and behind nohup hang-ups; so would
# every process that a test starts to interrupt it. A handler, whatever it does, is not inherited.
signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)


@pytest.fixture
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make fresh floating-point memory NaN, so that whatever nobody wrote shows up."""
    import torch

    def poisoned(make: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            out = make(*args, **kwargs)
            return out.fill_(float("nan")) if out.is_floating_point() else out

        return wrapped

    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))
