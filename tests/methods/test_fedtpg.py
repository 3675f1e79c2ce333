"""FedTPG: contexts for classes that no client has, and clients that train on their own only."""

import pytest
import torch
from torch.nn.functional import gelu, layer_norm

import fedprompt as fp
from fedprompt.methods.fedtpg import _GeneratedText, _Network, fedtpg
from tiny_federations import ONE_CLIENT, clip_federation, descend, last, parameters


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(("dim", "key_dim"), [(16, 16), (16, 12)])
def test_the_network_attends_head_by_head_and_adds_only_the_feed_forward_layer(dim, key_dim):
    torch.manual_seed(0)
    network, keys = _Network(3, dim, key_dim), torch.randn(5, key_dim)
    for parameter in network.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    own = {name.replace("attention.", ""): each for name, each in network.named_parameters()}

    def norm(tokens, name):
        return layer_norm(tokens, tokens.shape[-1:], own[f"{name}.weight"], own[f"{name}.bias"])

    names = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
    weights = own["in_proj_weight"].chunk(3) if dim == key_dim else [own[name] for name in names]
    queries, keys_normed = norm(own["queries"], "query_norm"), norm(keys, "key_norm")
    inputs, biases = (queries, keys_normed, keys_normed), own["in_proj_bias"].chunk(3)
    triples = zip(inputs, weights, biases, strict=True)
    query, key, value = (tokens @ weight.T + bias for tokens, weight, bias in triples)
    heads = [slice(dim // 4 * head, dim // 4 * (head + 1)) for head in range(4)]
    read = [(query[:, h] @ key[:, h].T / (dim // 4) ** 0.5).softmax(1) @ value[:, h] for h in heads]
    mixed = torch.cat(read, 1) @ own["out_proj.weight"].T + own["out_proj.bias"]
    wide = norm(mixed, "norm") @ own["widen.weight"].T + own["widen.bias"]
    gated = wide[:, : 4 * dim] * gelu(wide[:, 4 * dim :])
    expected = mixed + gated @ own["narrow.weight"].T + own["narrow.bias"]
    torch.testing.assert_close(network(keys[None])[0], expected)


def test_the_queries_start_near_zero_with_a_deviation_of_a_fiftieth():
    torch.manual_seed(0)
    queries = _Network(64, 64, 64).queries
    assert queries.abs().max() < 6 * 0.02
    assert queries.std().item() == pytest.approx(0.02, rel=0.05)


def test_classes_that_no_client_has_get_a_context_that_follows_from_their_names():
    federation = clip_federation()
    model = last(fedtpg, federation, learning_rate=0.05).of(0)
    new = ["yurt", "polar bear", "oak", "fig"]
    assert not set(new) & set(federation.class_names)
    logits = model(federation.inputs[:5], new)
    assert logits.shape == (5, 4)
    order = [2, 0, 3, 1]
    permuted = model(federation.inputs[:5], [new[each] for each in order])
    torch.testing.assert_close(permuted, logits[:, order])
    known, other = model.context(federation.class_names), model.context(new)
    assert (known - other).abs().max() > 1e-3


def test_a_client_with_one_class_sends_the_broadcast_back():
    """It has nothing to tell apart, because the other names are not given to it."""
    federation = clip_federation(**ONE_CLIENT)
    federation.labels = federation.labels.clone()
    federation.labels[federation.shards[0]] = 1
    found = parameters(last(fedtpg, federation, learning_rate=1.0), 0)
    torch.testing.assert_close(found, fp.snapshot(_GeneratedText(federation)))


def test_a_step_uses_the_names_and_labels_of_the_own_classes():
    """The client has classes 0 and 2, which become the first and the second of its names."""
    federation = clip_federation(**ONE_CLIENT | {"steps": 1})
    federation.labels = 2 * (torch.arange(len(federation.labels)) % 2)
    found = parameters(last(fedtpg, federation, learning_rate=1.0), 0)
    model = _GeneratedText(federation)
    ((tokens, labels),) = federation.batches(0, 0)
    names = [federation.class_names[0], federation.class_names[2]]
    loss = torch.nn.functional.cross_entropy(model(tokens, names), labels // 2)
    start = fp.snapshot(model)
    descend(loss, model.parameters(), 1.0)
    torch.testing.assert_close(found, fp.snapshot(model))
    assert any((found[name] - value).abs().max() > 1e-4 for name, value in start.items())
