"""Threads may share a frozen trunk, but not a model whose parameters a call replaces."""

import copy
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as Late
from functools import partial
from threading import Event

import pytest
import torch
import torch.nn as nn

from fedprompt import _threads, freeze
from fedprompt.guidance import double_backward, forward_mode, guide_gradient
from fedprompt.privacy import per_sample
from same import assert_identical

SECONDS = 10  # longest time for an event that must occur
BATCH = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), torch.arange(6) % 3
GUIDES = torch.randn(3, 3, generator=torch.Generator().manual_seed(1))


class Client(nn.Module):
    """Client that calls a function before its head, with the number of the call."""

    def __init__(self, trunk=None):
        super().__init__()
        self.trunk, self.head = trunk or nn.Identity(), nn.Linear(4, 3)
        self.head.register_forward_pre_hook(self.before)
        self.calls, self.then = 0, lambda call: None

    def before(self, *_):
        self.calls += 1
        self.then(self.calls)

    def forward(self, images):
        logits = self.head(self.trunk(images))
        return logits, logits

    def stop_at(self, number):
        """Stop in one call of the head until an event is set. Return this and a first event."""
        inside, go = Event(), Event()

        def wait(call):
            if call == number:
                inside.set()
                assert go.wait(SECONDS)

        self.calls, self.then = 0, wait
        return inside, go


def guided(client, method=forward_mode, **options):
    return guide_gradient(
        client, GUIDES, BATCH, BATCH, learning_rate=0.1, method=method, **options
    ).value


def sampled(client):
    copies = per_sample(client, len(BATCH[0]))
    copies(BATCH[0])[0].square().sum().backward()
    return copies.head.weight.grad


def small_trunk():
    return freeze(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))).eval()


CALLS = {
    "forward mode": guided,
    "double backward": partial(guided, method=double_backward),
    "per sample": sampled,
}


@pytest.mark.parametrize("second", ["double backward", "per sample"])
@pytest.mark.parametrize("first", CALLS)
def test_a_second_thread_is_refused_by_name_and_the_first_is_right(first, second):
    client = Client()
    expected, parameters = CALLS[first](client), dict(client.named_parameters())
    inside, go = client.stop_at(1)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(CALLS[first], client)
        assert inside.wait(SECONDS)
        for model, where in (
            (client, r"Client \(module 'head'\)"),
            (nn.ModuleDict({"mine": client.head}), r"ModuleDict \(module 'mine'\)"),
            (client.head, "Linear,"),
        ):
            with pytest.raises(RuntimeError, match=f"parameters of this {where}"):
                CALLS[second](model)
        go.set()
        assert_identical(running.result(SECONDS), expected)
    assert all(dict(client.named_parameters())[name] is own for name, own in parameters.items())
    assert_identical(CALLS[second](client), CALLS[second](copy.deepcopy(client)))


@pytest.mark.parametrize("stopped", [1, 2, 3])
@pytest.mark.parametrize("method", [forward_mode, double_backward])
def test_threads_with_a_model_each_share_a_frozen_trunk(method, stopped):
    """The first thread stops in its study, quiz or tangent pass. The second one waits for it."""
    trunk = small_trunk()
    first, second = Client(trunk), Client(trunk)
    call = partial(guided, method=method)
    expected, buffers = [call(first), call(second)], dict(trunk.named_buffers())
    inside, go = first.stop_at(stopped)
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(call, first)
        assert inside.wait(SECONDS)
        waiting = pool.submit(call, second)
        with pytest.raises(Late):
            waiting.result(0.1)
        go.set()
        assert_identical([running.result(SECONDS), waiting.result(SECONDS)], expected)
    assert all(dict(trunk.named_buffers())[name] is own for name, own in buffers.items())


def test_per_sample_runs_at_the_same_time_for_two_models_of_one_trunk():
    trunk = small_trunk()
    first, second = Client(trunk), Client(trunk)
    expected = sampled(first)
    inside, go = first.stop_at(1)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(sampled, first)
        assert inside.wait(SECONDS)
        assert_identical(sampled(second), sampled(copy.deepcopy(second)))
        go.set()
        assert_identical(running.result(SECONDS), expected)


@pytest.mark.parametrize("name", CALLS)
def test_an_error_in_the_model_frees_it_for_other_threads(name):
    client = Client()
    expected = CALLS[name](client)

    def fail(call):
        raise KeyError

    client.then = fail
    with pytest.raises(KeyError):
        CALLS[name](client)
    client.then = lambda call: None
    with ThreadPoolExecutor(1) as pool:
        assert_identical(pool.submit(CALLS[name], client).result(SECONDS), expected)
    assert not _threads._replacing


def test_nested_calls_of_one_thread_are_allowed():
    """A step computes a guide gradient, and so does the first pass of the model."""
    client, nested = Client(), []
    expected = guided(client)

    def update(parameters, gradients, *, learning_rate):
        nested.append(guided(client))
        return {name: value - learning_rate * gradients[name] for name, value in parameters.items()}

    assert_identical(guided(client, update=update), expected)
    client.calls = 0
    client.then = lambda call: call == 1 and nested.append(guided(client))
    assert_identical(guided(client), expected)
    assert_identical(nested, [expected, expected])
