"""Clients of unlike size: a method of one size is that of today, and each row has its clients."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

import fedprompt as fp
from fedprompt.methods import (
    METHODS,
    Federation,
    HeldOut,
    averaged,
    evaluate,
    fedavg_client,
    fedlora,
    fedvpt,
    fedvpt_d,
    hetlora,
    of_sizes,
    promptfl,
)
from low_rank import ONE_ROUND
from refusals import refused
from same import assert_same
from sent_messages import sent_by
from tiny_federations import clip_federation, last, parameters, vit_federation

pytestmark = pytest.mark.usefixtures("float64")
CLIENTS = range(5)


def deep(depth, length, **changes):
    """Make a federation whose setting has so many layers and prompts."""
    prompts = partial(fp.DeepPrompts, length, depth=depth)
    return vit_federation(num_prompts=length, prompts=prompts, **changes)


LAYERED = partial(fp.LayeredPrompts, 3, layers=(1,))
EQUAL = [
    (promptfl, {}, clip_federation, 4, partial(clip_federation, length=4)),
    (promptfl, {}, clip_federation, 3, partial(clip_federation, length=3)),
    (fedvpt, {}, vit_federation, 1, partial(vit_federation, num_prompts=1)),
    (fedvpt_d, {}, vit_federation, 2, vit_federation),
    (fedvpt_d, {}, vit_federation, 1, partial(deep, 1, 2)),
    (fedvpt_d, {}, vit_federation, [2, 1], partial(deep, 2, 1)),
    (fedlora, {"rank": 3}, vit_federation, 3, vit_federation),
    (fedlora, {"rank": 3}, vit_federation, 2, vit_federation),
    (hetlora, {"rank": 3}, vit_federation, 1, vit_federation),
]


@pytest.mark.parametrize(("make", "full", "federation", "size", "small"), EQUAL)
def test_with_one_size_for_all_the_method_is_bitwise_that_of_this_size(
    make, full, federation, size, small
):
    given = {"rank": size} if full else {}
    expected = last(make, small(cohort_size=2), **given)
    sizes = dict.fromkeys(CLIENTS, size)
    found = last(make, federation(cohort_size=2), **full, sizes=sizes)
    for client in CLIENTS:
        assert_same(parameters(found, client), parameters(expected, client))


def test_a_client_trains_as_in_the_method_of_its_size_and_rows_are_averaged_over_their_clients():
    """Client 3 has one token of four, and client 1 has two. The newcomer has all."""
    made = clip_federation(**ONE_ROUND)
    messages = sent_by(made)
    predictions = last(promptfl, made, sizes={3: 1, 1: 2})
    down, up = messages.at(0, "down"), messages.at(0, "up")
    lengths = {0: 4, 1: 2, 2: 4, 3: 1, 4: 4}
    for client, length in lengths.items():
        assert down[client]["context.context"].shape == (1, length, 16)
        assert up[client]["context.context"].value.shape == (1, length, 16)
        assert parameters(predictions, client)["context.context"].shape == (1, length, 16)
    (found,) = parameters(predictions, 5).values()
    for token in range(4):
        known = [client for client in lengths if lengths[client] > token]
        sizes = [made.num_examples(client) for client in known]
        values = [up[client]["context.context"].value[0, token] for client in known]
        expected = sum(s * v for s, v in zip(sizes, values, strict=True)) / sum(sizes)
        torch.testing.assert_close(found[0, token], expected)
        moved = (expected - down[0]["context.context"][0, token]).abs().max()
        assert moved > 1e-4, token


def test_layers_that_others_choose_may_be_fewer_or_shorter():
    made = vit_federation(prompts=partial(fp.LayeredPrompts, 3, layers=(0, 1)), cohort_size=5)
    predictions = last(fedvpt_d, made, sizes={0: 1, 1: (2, 1), 2: (1, 2)})
    shapes = [tuple(predictions.of(client).prompts.tokens.shape) for client in range(4)]
    assert shapes == [(1, 3, 8), (2, 1, 8), (1, 2, 8), (2, 3, 8)]
    assert [predictions.of(client).prompts.layers for client in (0, 3)] == [(0,), (0, 1)]
    one = last(fedvpt_d, vit_federation(prompts=LAYERED), sizes={0: 2})  # of the only layer
    assert one.of(0).prompts.tokens.shape == (1, 2, 8)


@pytest.mark.parametrize("codec", [fp.codecs.int8(), fp.codecs.top_k(fraction=0.5)])
def test_payloads_of_unlike_sizes_are_encoded(codec):
    made = vit_federation(cohort_size=3)
    method = fp.rounds.coded(fedlora(made, rank=2, sizes={1: 1}), codec)
    *_, now = fp.run_rounds(method, made.data, made.cohorts())
    exact = last(fedlora, made, rank=2, sizes={1: 1}).now.server["values"]
    apart = [(now.server["values"][name] - value).abs().max() for name, value in exact.items()]
    assert 0 < max(apart) < 0.05


def test_a_round_is_continued_with_its_sizes_alone_and_keys_may_be_texts():
    made = clip_federation()
    rounds = fp.run_rounds(promptfl(made, sizes={0: 2, 1: 3}), made.data, made.cohorts())
    start, whole = next(rounds), next(rounds)
    texts = promptfl(made, sizes={"1": np.int64(3), "0": 2})  # as in a file of JSON
    (again,) = fp.run_rounds(texts, made.data, made.cohorts(), start=start)
    assert_same(tuple(again), tuple(whole), ordered=False)
    for sizes in (None, {0: 2}, {0: 2, 1: 2}):
        other = promptfl(made, sizes=sizes)
        with pytest.raises(
            ValueError, match=r"`start` must be a round of the same method, .*sizes"
        ):
            next(fp.run_rounds(other, made.data, made.cohorts(), start=start))


@pytest.mark.parametrize("name", ["promptfl", "fedlora", "flora"])
def test_clients_that_a_federation_lacks_are_refused_when_it_is_known(name):
    whole = clip_federation() if name == "promptfl" else vit_federation()
    own = Federation(whole.inputs, whole.labels, whole.shards)
    method = METHODS[name].make(replace(whole, clients=()), sizes={9: 1})
    with pytest.raises(ValueError, match="`sizes` must name clients of the setting; got 9"):
        next(fp.run_rounds(method, own))


def test_another_averaged_method_gets_sizes_by_its_maker_and_keeps_its_server():
    made = clip_federation(cohort_size=2)

    def of_length(length):
        model = replace(made, length=length).new_model()
        server = fp.averaging_server(fp.snapshot(model), fp.ema(decay=0.5))
        return averaged(model, fedavg_client(model, 0.1), server=server)

    method = of_sizes(made, of_length, dict.fromkeys(CLIENTS, 3), length=4)
    found = last(lambda setting: method, made)
    expected = last(lambda setting: of_length(3), made)
    for client in CLIENTS:
        assert_same(parameters(found, client), parameters(expected, client))
    with pytest.raises(
        ValueError, match="`make` must have an averaging_server; got another server"
    ):
        of_sizes(vit_federation(), lambda rank: hetlora(vit_federation(), rank=rank), {}, rank=2)


def test_models_of_unlike_size_are_not_tested_as_one():
    made = clip_federation()
    data = Federation(made.inputs, made.labels, made.shards)
    method = promptfl(made, sizes={1: 2})
    start = fp.Round(-1, method.server.state, {})
    tests = HeldOut(made.inputs, made.labels)
    with pytest.raises(ValueError, match="`shared` must be False for clients of unlike size"):
        evaluate(method, data, start, tests, shared=True)
    assert evaluate(method, data, start, tests, shared=True, clients=[0, 2])["trained"] == 4 * 16


CLIP, VIT = clip_federation, vit_federation
TUNED = partial(vit_federation, tune=partial(fp.tuning.norms))
test_wrong_sizes_are_refused = refused(globals())("""
promptfl(CLIP(), sizes={0: 5}) -> ValueError: `sizes[0]` must be at most 4, the full length; got 5.
promptfl(CLIP(), sizes={0: 0}) -> ValueError: `sizes[0]` must be at least 1; got 0.
promptfl(CLIP(), sizes={0: -2}) -> ValueError: `sizes[0]` must be at least 1; got -2.
promptfl(CLIP(), sizes={0: 2.0}) -> TypeError: `sizes[0]` must be an integer; got 2.0 (float).
promptfl(CLIP(), sizes={0: True}) -> TypeError: `sizes[0]` must be an integer; got True (bool).
promptfl(CLIP(), sizes={0: None}) -> TypeError: `sizes[0]` must be an integer
promptfl(CLIP(), sizes={0: (2, 2)}) -> ValueError: `sizes[0]` must be a number, or up to 1 of
promptfl(CLIP(), sizes={5: 2}) -> ValueError: `sizes` must name clients of the setting; got 5.
promptfl(CLIP(), sizes={-1: 2}) -> ValueError: `key of sizes` must be at least 0; got -1.
promptfl(CLIP(), sizes={"a": 2}) -> TypeError: `key of sizes` must be an integer; got 'a' (str).
promptfl(CLIP(), sizes={0: 2, "0": 2}) -> ValueError: `sizes` must name each client once; got
promptfl(CLIP(), sizes=[2, 2]) -> TypeError: `sizes` must map ids of clients to sizes; got a list
fedvpt_d(VIT(), sizes={0: 3}) -> ValueError: `sizes[0]` must be at most 2, the full depth; got 3.
fedvpt_d(VIT(), sizes={0: (1, 3)}) -> ValueError: `sizes[0]` must be at most 2, the full length;
fedvpt_d(VIT(), sizes={0: ()}) -> ValueError: `sizes[0]` must be a number, or up to 2 of them; got
fedvpt_d(TUNED(), sizes={0: 1}) -> TypeError: `sizes` must be None, unless clients train
fedlora(VIT(), rank=2, sizes={0: 3}) -> ValueError: `sizes[0]` must be at most 2, the full rank;
METHODS['flora'].make(VIT(), rank=2, sizes={0: 3}) -> ValueError: `sizes[0]` must be at most 2,
""")
