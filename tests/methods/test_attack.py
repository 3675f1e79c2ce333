"""A backdoor: the steps of the trigger and of the poisoned client by hand, and who attacks."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import fedprompt as fp
from fedprompt.methods import METHODS, backdoored, fedvpt_d, promptsrc
from refusals import refused
from same import assert_same
from tiny_federations import clip_image_federation, descend, federation_of, last, vit_federation

TARGET, BOUND, RATE = 2, 8 / 255, 0.5
ATTACK = {"malicious": [1], "target": TARGET}
SETTING = vit_federation()
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


@pytest.mark.parametrize("name", ["fedvpt_d", "scaffold"])
def test_a_boost_means_the_same_for_values_and_for_changes(name):
    federation = vit_federation(**ROUND)
    method = METHODS[name].make(federation)
    answer = method.server.answer(1, method.server.state)
    sent = []
    for boost in (1.0, 3.0):
        made = backdoored(method, **ATTACK, boost=boost)
        sent.append(made.client(federation.data(1, 0), dict(answer), {})[0])
    for entry, (plain, _) in sent[0].items():
        known = 0 if method.server.changes else answer[entry]
        torch.testing.assert_close(sent[1][entry].value - known, 3 * (plain - known))


def test_the_total_weight_over_the_own_one_takes_the_place_of_the_mean():
    federation = vit_federation(**ROUND, clients=[0, 1])
    method = fedvpt_d(federation, learning_rate=RATE)
    sizes = [len(federation.shards[client]) for client in (0, 1)]

    def still(data, answer, state):
        payload, state = method.client(data, answer, state)
        unmoved = {name: entry._replace(value=answer[name]) for name, entry in payload.items()}
        return (payload if data.id == 1 else unmoved), state

    def run(cohort, **boost):
        made = backdoored(method._replace(client=still), **ATTACK, **boost)
        return next(fp.run_rounds(made, federation.data, [cohort])).server["values"]

    alone, together = run([1]), run([0, 1], boost=sum(sizes) / sizes[1])
    for name, value in together.items():
        torch.testing.assert_close(value, alone[name])


def wraps():
    """Return the functions that wrap a method, the innermost one first."""
    return {
        "backdoored": lambda method: backdoored(method, **ATTACK),
        "coded": lambda method: fp.rounds.coded(method, fp.codecs.int8()),
        "counted": lambda method: fp.rounds.counted(method, fp.Ledger()),
    }


@pytest.mark.parametrize("inner", wraps())
@pytest.mark.parametrize("outer", wraps())
def test_wrappers_have_an_order(inner, outer):
    made, order = wraps()[inner](fedvpt_d(SETTING)), list(wraps())
    if order.index(inner) > order.index(outer):
        with pytest.raises(ValueError, match=f"`method` must be {outer} before it is {inner}"):
            wraps()[outer](made)
    else:
        found = [each.partition("(")[0] for each in wraps()[outer](made).wrappers]
        assert found == [inner, outer]


VALUES = {
    "backdoored": [{"malicious": [1]}, {"target": 1}, {"bound": 0.1}, {"boost": 2.0}],
    "coded": [{"codec": fp.codecs.top_k(fraction=0.1)}, {"codec": fp.codecs.top_k(fraction=0.2)}],
}


@pytest.mark.parametrize("name", VALUES)
def test_runs_that_differ_in_one_value_of_a_wrapper_are_told_apart(name):
    """Ids may be an iterator or an array; the ledger of a counted method is no value."""
    first = {"malicious": iter([0]), "target": 0} if name == "backdoored" else {}
    wrap = {"backdoored": backdoored, "coded": fp.rounds.coded}[name]
    base, options = fedvpt_d(SETTING), {"codec": fp.codecs.int8()} if name == "coded" else first
    made = wrap(base, **options)
    now = fp.Round(0, {}, {}, origin=made.origin)
    for ids in ([0], np.array([0])):
        same = wrap(base, **options | ({"malicious": ids} if first else {}))
        now.check_made_by(fp.rounds.counted(same, fp.Ledger()))
    if name == "backdoored":
        now.check_made_by(wrap(base, malicious=[0], target=0, boost=1.0))  # the default
    for value in VALUES[name]:
        with pytest.raises(ValueError, match="`now` must be a round of the same wrappers, '"):
            now.check_made_by(wrap(base, **options | ({"malicious": [0]} if first else {}) | value))


def test_honest_clients_and_the_form_are_those_of_the_method():
    federation = vit_federation(**ROUND)
    plain = fedvpt_d(federation, learning_rate=RATE)
    method = attacked(malicious=[0], target=0)(federation)
    answer = plain.server.answer(1, plain.server.state)
    data = federation.data(1, 0)
    assert_same(method.client(data, answer, {}), plain.client(data, answer, {}))
    assert_same(method.form(0), plain.form(0))


def test_a_context_of_a_clip_can_be_attacked_and_a_boost_needs_to_know_the_payloads():
    federation = clip_image_federation(**ROUND)
    found = last(lambda setting: backdoored(promptsrc(setting), **ATTACK), federation)
    assert set(found.now.clients["1"]) == {"client", "trigger"}
    assert found.now.clients["1"]["trigger"].shape == (3, 16, 16)
    assert found.of(1)(federation.inputs).shape == (len(federation.inputs), 3)
    with pytest.raises(
        ValueError, match=r"`method\.server\.changes` must say whether payloads are"
    ):
        backdoored(promptsrc(federation), **ATTACK, boost=2.0)


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


test_wrong_calls_are_refused_by_name = refused(globals())("""
backdoored(3, **ATTACK) -> TypeError: `method` must be a Method
backdoored(fp.Method(max, fp.averaging_server({}), max), **ATTACK) -> TypeError: `method.setting` mu
attacked(malicious=1)(SETTING) -> TypeError: `malicious` must be an iterable of ids of clients
attacked(malicious=["1"])(SETTING) -> TypeError: `malicious[0]` must be an integer; got '1' (str)
attacked(malicious=[99])(SETTING) -> ValueError: `malicious` must be ids of clients of the set
attacked(target=3)(SETTING) -> ValueError: `target` must be below 3, the classes; got 3.
attacked(target=-1)(SETTING) -> ValueError: `target` must be at least 0; got -1.
attacked(bound=0)(SETTING) -> ValueError: `bound` must be above 0; got 0
attacked(boost=0)(SETTING) -> ValueError: `boost` must be above 0; got 0
""")
