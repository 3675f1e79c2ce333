"""FedGen: without generated features it averages heads, and its features are recognized."""

import pytest
import torch
import torch.nn.functional as F

import fedprompt as fp
from fedprompt.methods.fedgen import _FeatureGenerator, fedgen
from sent_messages import sent_by
from tiny_federations import CLASSES, descend, last, mixed_federation


def test_the_global_head_recognizes_generated_features():
    """The broadcast of the second round has the generator that the first one trained."""
    made = mixed_federation()
    messages = sent_by(made)
    last(fedgen, made, server_steps=60, server_rate=5e-2)
    first, second = messages.of("down")[0][2], messages.of("down")[-1][2]
    assert not first["counts"].any()  # nothing is generated in the first round
    generator = _FeatureGenerator(CLASSES, 6)
    values = {name.removeprefix("generator."): second[name] for name in second}
    generator.load_state_dict({name: values[name] for name in generator.state_dict()})
    draw = torch.Generator().manual_seed(0)
    features, labels = generator.draw(second["counts"], 300, draw)
    guesses = (features @ second["head.weight"].T + second["head.bias"]).argmax(1)
    assert (guesses == labels).float().mean() > 0.95


def test_a_later_step_descends_the_weighted_loss_of_generated_features_too():
    """No client has class 0, and features of the other ones are generated."""
    made = mixed_federation(rounds=2, steps=1, make_optimizer=torch.optim.SGD)
    made.labels = made.labels.clamp(min=1)
    method = fedgen(made, learning_rate=0.1, generated_weight=0.5)
    *_, now = fp.run_rounds(method, made.data, [range(5)])
    answer, data = method.server.answer(1, now.server), made.data(1, 1)
    _, found = method.client(data, answer, now.clients["1"])
    model, generator = made.new_model(1), _FeatureGenerator(CLASSES, 6)
    fp.load_values(model, now.clients["1"])
    fp.load_values(model.head, fp.part(answer, "head"))
    fp.load_values(generator, fp.part(answer, "generator"))
    features, drawn = generator.draw(answer["counts"], made.batch_size, data.generator("generated"))
    ((images, labels),) = made.batches(1, 1)
    loss = F.cross_entropy(model(images), labels)
    loss += 0.5 * F.cross_entropy(model.head(features.detach()), drawn)
    descend(loss, model.parameters(), 0.1)
    torch.testing.assert_close(found, fp.snapshot(model, buffers=True))


def test_batches_of_one_image_are_refused_before_any_client_trains():
    with pytest.raises(ValueError, match=r"^`batch_size` must be at least 2 for FedGen, whose"):
        fedgen(mixed_federation(batch_size=1))


def test_labels_are_drawn_as_often_as_clients_have_them():
    draw = torch.Generator().manual_seed(0)
    _, labels = _FeatureGenerator(3, 4).draw(torch.tensor([6.0, 0.0, 2.0]), 4000, draw)
    shares = torch.bincount(labels, minlength=3) / 4000
    torch.testing.assert_close(shares, torch.tensor([0.75, 0.0, 0.25]), atol=0.02, rtol=0)


def test_the_servers_optimizer_goes_on_where_it_ended():
    made = mixed_federation(rounds=2)
    *_, now = fp.run_rounds(fedgen(made, server_steps=5), made.data, made.cohorts())
    steps = {float(part["step"]) for part in now.server["adam"]["state"].values()}
    assert steps == {10.0}
