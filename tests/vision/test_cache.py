"""The encoder cache: budget, order of eviction, pins, books."""

import random

import pytest
import torch

from k3vl.vision.cache import EncoderCache


def features(rows: int, fill: float = 0.0) -> torch.Tensor:
    return torch.full((rows, 4), fill)  # 16 bytes a row


def test_returns_what_was_put_and_counts():
    cache = EncoderCache(1000)
    stored = features(2, 3.0)
    assert cache.get("a") is None
    assert cache.put("a", stored)
    assert torch.equal(cache.get("a"), stored)
    stats = cache.stats()
    assert (stats.hits, stats.misses, stats.entries, stats.bytes) == (1, 1, 1, 32)


def test_the_least_recently_used_entry_goes_first():
    cache = EncoderCache(48)
    for name in "abc":
        cache.put(name, features(1))
    cache.get("a")
    cache.put("d", features(1))
    assert "b" not in cache
    assert all(name in cache for name in "acd")
    assert cache.stats().evictions == 1


def test_pinned_entries_stay_until_every_pin_is_taken_back():
    cache = EncoderCache(32)
    cache.put("a", features(1))
    assert cache.pin("a")
    assert cache.pin("a")
    cache.unpin("a")
    for name in "bcd":
        cache.put(name, features(1))
    assert "a" in cache
    assert cache.stats().pinned_bytes == 16
    cache.unpin("a")
    cache.put("e", features(2))
    assert "a" not in cache


def test_features_without_room_are_refused_and_nothing_is_evicted_for_them():
    cache = EncoderCache(48)
    cache.put("a", features(1))
    cache.put("b", features(1))
    cache.pin("a")
    assert not cache.fits(48)
    assert not cache.put("big", features(3))
    assert not cache.put("huge", features(100))
    assert "b" in cache
    assert cache.stats().refused == 2
    assert cache.stats().evictions == 0


def test_a_digest_keeps_its_first_features():
    cache = EncoderCache(100)
    first = features(1, 1.0)
    cache.put("a", first)
    cache.put("a", features(1, 2.0))
    assert cache.get("a") is first
    assert cache.stats().bytes == 16


def test_a_slice_does_not_keep_its_batch_alive():
    cache = EncoderCache(1000)
    cache.put("a", features(50)[:1])
    assert cache.get("a").untyped_storage().nbytes() == 16
    cache.check_integrity()


def test_pin_of_an_absent_entry_says_so_and_unpin_is_checked():
    cache = EncoderCache(100)
    assert not cache.pin("a")
    with pytest.raises(AssertionError, match="not held"):
        cache.unpin("a")
    cache.put("a", features(1))
    with pytest.raises(AssertionError, match="not pinned"):
        cache.unpin("a")


def test_budget_of_zero_holds_nothing():
    cache = EncoderCache(0)
    assert not cache.put("a", features(1))
    cache.check_integrity()


@pytest.mark.parametrize("seed", range(10))
def test_books_hold_over_random_walks(seed):
    draw = random.Random(seed)
    cache = EncoderCache(16 * 20)
    pins: dict[str, int] = {}
    for _ in range(400):
        name = f"d{draw.randrange(30)}"
        action = draw.choice(["put", "put", "get", "pin", "unpin"])
        if action == "put":
            cache.put(name, features(1 + int(name[1:]) % 6, float(name[1:])))
        elif action == "get" and (found := cache.get(name)) is not None:
            assert (found == float(name[1:])).all()
        elif action == "pin" and sum(pins.values()) < 5 and cache.pin(name):
            pins[name] = pins.get(name, 0) + 1
        elif action == "unpin" and pins.get(name):
            cache.unpin(name)
            pins[name] -= 1
        cache.check_integrity()
        assert all(held in cache for held, count in pins.items() if count)
