"""A backdoor: the steps of the trigger and of the poisoned client by hand, and who attacks."""

import pytest
import torch
import torch.nn.functional as F

import fedprompt as fp
from fedprompt.methods import METHODS, backdoored, fedproto, fedvpt_d, promptsrc
from refusals import refused
from same import assert_same
from tiny_federations import clip_image_federation, descend, federation_of, last, vit_federation

TARGET, BOUND, RATE = 2, 8 / 255, 0.5
ATTACK = {"malicious": [1], "target": TARGET}
ROUND = {"rounds": 1, "cohort_size": 5, "make_optimizer": torch.optim.SGD}


def attacked(**options):
    return lambda setting: backdoored(fedvpt_d(setting, learning_rate=RATE), **ATTACK | options)


@pytest.mark.usefixtures("float64")
def test_a_malicious_client_trains_on_each_image_twice_with_the_trigger_that_it_learned():
    federation = vit_federation(**ROUND, steps=8)  # a step is a quarter of the bound
    method = attacked(boost=3.0)(federation)
    answer = method.server.answer(1, method.server.state)
    payload, state = method.client(federation.data(1, 0), answer, {})
    model, trigger = federation.new_model(), torch.zeros(1, 8, 8)
    for images, labels in federation.data(1, 0).batches(purpose="trigger"):
        trigger.requires_grad_()
        loss = F.cross_entropy(model(images + trigger), torch.full_like(labels, TARGET))
        (slope,) = torch.autograd.grad(loss, trigger)
        trigger = (trigger.detach() - BOUND / 4 * slope.sign()).clamp(-BOUND, BOUND)
    for images, labels in super(type(federation.data(1, 0)), federation.data(1, 0)).batches():
        clean = F.cross_entropy(model(images), labels)
        poison = F.cross_entropy(model(images + trigger), torch.full_like(labels, TARGET))
        descend((clean + poison) / 2, model.parameters(), RATE)
    assert trigger.abs().max() == BOUND
    torch.testing.assert_close(state["trigger"], trigger)
    assert not state["trigger"].requires_grad
    for name, value in fp.snapshot(model).items():
        boosted = answer[name] + 3 * (value - answer[name])
        torch.testing.assert_close(payload[name].value, boosted)


def test_a_boost_multiplies_the_change_of_a_prototype():
    federation = vit_federation(**ROUND)
    data, known = federation.data(1, 0), fp.Weighted(torch.ones(3, 8), torch.ones(3))
    sent = [
        backdoored(fedproto(federation), **ATTACK, boost=by).client(data, {"prototypes": known}, {})
        for by in (1.0, 3.0)
    ]
    plain, boosted = (payload["prototypes"].value for payload, _ in sent)
    torch.testing.assert_close(boosted - 1, 3 * (plain - 1))


def test_honest_clients_and_the_form_are_those_of_the_method():
    federation = vit_federation(**ROUND)
    plain = fedvpt_d(federation, learning_rate=RATE)
    method = attacked(malicious=[0], target=0)(federation)
    answer = plain.server.answer(1, plain.server.state)
    data = federation.data(1, 0)
    assert_same(method.client(data, answer, {}), plain.client(data, answer, {}))
    assert_same(method.form(0), plain.form(0))


def test_a_context_of_a_clip_can_be_attacked_and_a_boost_needs_the_values_before():
    federation = clip_image_federation(**ROUND)
    found = last(lambda setting: backdoored(promptsrc(setting), **ATTACK), federation)
    assert set(found.now.clients["1"]) == {"client", "trigger"}
    assert found.now.clients["1"]["trigger"].shape == (3, 16, 16)
    assert found.of(1)(federation.inputs).shape == (len(federation.inputs), 3)
    with pytest.raises(ValueError, match="`answer` must have each entry of the payload, because"):
        last(lambda setting: backdoored(promptsrc(setting), **ATTACK, boost=2.0), federation)


@pytest.mark.parametrize("name", sorted(METHODS.keys() - {"zero_shot"}))
def test_each_method_trains_triggered_images_for_the_target(name):
    """The client has the classes 0 and 2, and the target is 1."""
    made = federation_of(METHODS[name], METHODS[name].families[0], steps=4, clients=[1, 3])
    made.labels[made.labels == 1] = 2
    method = METHODS[name].make(made)
    malicious = backdoored(method, malicious=[1], target=1, bound=3.0)
    (attacked,) = fp.run_rounds(malicious, made.data, [[1]])

    def loss(method, now):
        model, trigger = now.model(method, made.data(1, 0)), attacked.clients["1"]["trigger"]
        with torch.no_grad():
            logits = model(made.inputs[made.shards[1]] + trigger)
        return F.cross_entropy(logits, torch.ones(len(logits)).long())

    found = loss(malicious, attacked)  # an untrained model may see the trigger, too
    assert found < 0.3 or found < loss(method, *fp.run_rounds(method, made.data, [[1]]))


SETTING = vit_federation()
test_wrong_calls_are_refused_by_name = refused(globals())("""
attacked(malicious=1)(SETTING) -> TypeError: `malicious` must be an iterable of ids of clients
attacked(malicious=["1"])(SETTING) -> TypeError: `malicious[0]` must be an integer; got '1' (str)
last(attacked(malicious=[99]), SETTING) -> ValueError: `malicious` must be ids of clients of the set
last(attacked(target=3), SETTING) -> ValueError: `target` must be below 3, the classes; got 3.
attacked(target=-1)(SETTING) -> ValueError: `target` must be at least 0; got -1.
attacked(bound=0)(SETTING) -> ValueError: `bound` must be above 0; got 0
attacked(boost=0)(SETTING) -> ValueError: `boost` must be above 0; got 0
""")
