"""Autocast of clients that take turns, and of iterators of batches that never end."""

import torch

from fedprompt._casts import ended, entered


def is_on() -> bool:
    assert not (torch.is_autocast_enabled("cpu") and torch.is_autocast_cache_enabled())
    return torch.is_autocast_enabled("cpu")


def test_autocast_ends_with_its_last_user_or_with_the_client():
    for _ in range(2):
        first, second = (entered("cpu", torch.bfloat16) for _ in range(2))
        for user in (first, second):
            user.__enter__()
            assert is_on()
        first.__exit__(None, None, None)
        assert is_on()
        second.__exit__(None, None, None)
        assert not is_on()
        kept = entered("cpu", torch.bfloat16)
        with ended():
            kept.__enter__()
            assert is_on()
        assert not is_on()
        with entered("cpu", torch.bfloat16):
            kept.__exit__(None, None, None)  # its autocast has ended
            assert is_on()
        assert not is_on()
