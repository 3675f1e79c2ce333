"""Cohorts are uniform, and random streams depend on their arguments alone."""

import hashlib
import random
from itertools import product

import numpy as np
import pytest
import torch

from fedprompt import sample_clients, stream_generator
from refusals import refused

DRAW = torch.Generator().manual_seed(0)


@pytest.mark.parametrize(("size", "drawn"), [(0, 1), (1, 1), (3, 3), (10, 10)])
def test_a_cohort_is_ordered_without_replacement_and_never_empty(size, drawn, generator):
    clients = [f"client {number}" for number in range(10)]
    for _ in range(20):
        chosen = sample_clients(clients, size=size, generator=generator)
        assert len(chosen) == len(set(chosen)) == drawn
        assert chosen == sorted(chosen, key=clients.index)
    order = torch.randperm(50, generator=torch.Generator().manual_seed(1)).tolist()
    chosen = sample_clients(range(50), size=9, generator=generator.manual_seed(1))
    assert chosen == sorted(order[:9])  # so cohorts are uniform


def test_a_cohort_does_not_depend_on_the_default_device(generator):
    with torch.device("meta"):
        assert len(sample_clients(range(9), size=3, generator=generator)) == 3


def numbers(generator):
    return tuple(torch.randint(2**62, (3,), generator=generator).tolist())


def test_streams_differ_between_arguments_and_repeat_for_equal_ones():
    ids = (0, 1, 2, 9, 2**32, 2**40, 2**64 - 1, 2 + 5 * 2**32)
    calls = list(product((0, 7, 2**128 - 1), ids, (None, *ids), ("", "a", "b")))

    def draw(call):
        seed, server_round, client, purpose = call
        arguments = {"server_round": server_round, "client": client, "purpose": purpose}
        return numbers(stream_generator(seed, **arguments))

    first = {call: draw(call) for call in calls}
    assert len(set(first.values())) == len(calls)
    assert {call: draw(call) for call in reversed(calls)} == first  # independent of earlier draws


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int32, np.uint64])
def test_an_id_may_be_an_integer_of_numpy(dtype):
    plain = stream_generator(0, server_round=3, client=7)
    drawn = stream_generator(0, server_round=dtype(3), client=dtype(7))
    assert numbers(drawn) == numbers(plain)


@pytest.mark.parametrize("client", [None, 7, 2**33])
def test_streams_are_those_of_numpys_mersenne_twister(client):
    key = [3, 0, int(client is not None), (client or 0) % 2**32, (client or 0) >> 32]
    key += np.frombuffer(hashlib.sha256("noise µ".encode()).digest(), "<u4").tolist()
    twister = np.random.MT19937(np.random.SeedSequence(5, spawn_key=key))
    state = twister.state
    state["state"]["pos"] = 624  # numpy starts with the last word of the seed
    twister.state = state
    generator = stream_generator(5, server_round=3, client=client, purpose="noise µ")
    drawn = torch.randint(2**24, (1000,), generator=generator)
    assert drawn.tolist() == (twister.random_raw(1000) % 2**24).tolist()


def test_streams_count_as_seeded():
    seeds = {
        stream_generator(0, server_round=0, client=client).initial_seed() for client in range(50)
    }
    assert torch.Generator().initial_seed() not in seeds
    assert len(seeds) == 50


@pytest.mark.unhooked  # which element of a sequence the hook checks is random
def test_streams_and_cohorts_leave_the_global_generators_unchanged():
    def state():
        numpy_state = np.random.get_state()[1].tolist()  # noqa: NPY002 - it must not change
        return torch.get_rng_state().tolist(), numpy_state, random.getstate()

    before = state()
    numbers(stream_generator(1, server_round=2, client=3))
    draw = stream_generator(0, server_round=0, client=0)
    assert sample_clients(np.arange(9), size=9, generator=draw) == list(range(9))
    assert state() == before


test_wrong_calls_are_refused_by_name = refused(globals())("""
sample_clients([], size=0, generator=DRAW) -> ValueError: `clients` must have at least one client
sample_clients([1, 2], size=3, generator=DRAW) -> ValueError: `size` must be at most 2, the
sample_clients([1, 2], size=-1, generator=DRAW) -> ValueError: `size` must be at least 0; got -1
sample_clients([1, 2], size=1, generator=None) -> TypeError: `generator` must be a torch.Generator
stream_generator(0, server_round=0, purpose=1) -> TypeError: `purpose` must be a string; got 1
stream_generator(-1, server_round=0) -> ValueError: `seed` must be at least 0; got -1
stream_generator(2**128, server_round=0) -> ValueError: `seed` must be below 2**
stream_generator(True, server_round=0) -> TypeError: `seed` must be an integer
stream_generator(0, server_round=-1) -> ValueError: `server_round` must be at least 0; got -1
stream_generator(0, server_round=2**64) -> ValueError: `server_round` must be below 2**
stream_generator(0, server_round=0, client=-1) -> ValueError: `client` must be at least 0; got -1
stream_generator(0, server_round=0, client=2**64) -> ValueError: `client` must be below 2**
sample_clients(np.zeros((2, 2)), size=1, generator=DRAW) -> TypeError: `clients` must be a sequence
sample_clients(5, size=1, generator=DRAW) -> TypeError: `clients` must be a sequence of ids, such as
""")
