"""The audit of messages: every method passes, and those that leak are found."""

import os
from dataclasses import fields, replace
from functools import partial

import peft  # noqa: F401  (each forked process would import it again)
import pytest
import torch

import leaks
from fedprompt import methods
from fedprompt.methods import ClipSetting, Federation, VitSetting, check_messages, fedprox
from refusals import refused
from tiny_federations import federation_of, vit_federation


def separated(made, **changes):
    """Return the setting and the inputs of a federation of two clients."""
    kind = VitSetting if isinstance(made, VitSetting) else ClipSetting
    own = {each.name: getattr(made, each.name) for each in fields(kind) if each.init}
    shards = {client: made.shards[client] for client in range(2)}
    return kind(**own | changes), Federation(made.inputs, made.labels, shards)


def small(**changes):
    made = vit_federation(cohort_size=2, clients=range(2), steps=1)
    return separated(made, public=torch.zeros(2, *made.inputs.shape[1:]), **changes)


@pytest.mark.parametrize("leak", leaks.LEAKS)
def test_a_method_that_crosses_without_a_message_is_found(leak):
    leaks.FILE.unlink(missing_ok=True)
    leaks.HELD.clear()
    leaks.SEEN.clear()
    with pytest.raises(ValueError, match="`method` must read nothing of other clients but mess"):
        check_messages(leak, *small())
    leaks.FILE.unlink(missing_ok=True)


@pytest.mark.parametrize("honest", leaks.HONEST)
def test_an_honest_method_passes(honest):
    torch.manual_seed(5)  # any seed of the loop
    setting, federation = small(rounds=2)
    found = check_messages(honest, setting, federation)
    assert found == 2 * (2 * (2 + 2) + 2 + 2 * 2)  # calls of two rounds, and predictions


@pytest.mark.slow  # all methods, in processes; `.ci/run` runs them
@pytest.mark.parametrize("number", range(len(leaks.GROUPS)))
def test_messages_are_all_that_crosses(number):
    """Client 1 trains after client 0. Then both predict, with their state and as newcomers."""
    (family, *_), names = list(leaks.GROUPS.items())[number]
    budget = {"rounds": 1, "cohort_size": 2, "steps": 1, "clients": [0, 1]}
    setting, federation = separated(federation_of(methods.METHODS[names[0]], family, **budget))
    check_messages(f"{leaks.__file__}:group_{number}", setting, federation)


def test_images_may_be_expanded_shared_or_bytes():
    setting, federation = small()
    gray = federation.inputs
    for inputs in (gray.clone().share_memory_(), gray[:, :1].expand(gray.shape), (gray * 9).byte()):
        check_messages(leaks.number_of_images, setting, replace(federation, inputs=inputs))


@pytest.mark.parametrize("part", ["inputs", "sizes"])
def test_a_client_that_reads_the_whole_federation_of_the_program_is_found(part):
    """In shared memory, which another process could see, and by the sizes of the shards alone."""
    setting, federation = small()
    federation = replace(federation, inputs=federation.inputs.clone().share_memory_())
    leaks.HELD[:] = [federation.inputs if part == "inputs" else dict(federation.shards)]
    with pytest.raises(ValueError, match="`method` must read nothing of other clients but mess"):
        check_messages(getattr(leaks, f"{part}_of_the_program"), setting, federation)
    leaks.HELD.clear()


def test_a_cache_that_training_has_filled_is_found():
    leaks.HELD.append(torch.ones(1))
    with pytest.raises(ValueError, match="another result of 'client'"):
        check_messages(leaks.in_a_cache, *small())
    leaks.HELD.clear()


def test_a_method_that_ends_its_process_is_an_error_and_the_next_audit_goes_on(monkeypatch):
    monkeypatch.setenv("AUDITED_IN", str(os.getpid()))  # it ends other processes alone
    with pytest.raises(RuntimeError, match="The process that repeats the calls has ended"):
        check_messages(leaks.ends_the_process, *small())
    check_messages(leaks.number_of_images, *small())


@pytest.mark.slow  # each process imports PyTorch, timm and open_clip
def test_where_no_process_can_be_forked_each_client_has_one_that_is_started(monkeypatch):
    monkeypatch.delattr(os, "fork")
    setting, federation = small()
    alone = replace(federation, shards={0: federation.shards[0]})
    check_messages(leaks.dropout, replace(setting, clients=[0], cohort_size=1), alone)
    with pytest.raises(ValueError, match=r"another result of 'client' \(client"):
        check_messages(leaks.in_a_list, *small())


def nested(setting):
    return fedprox(setting)


SETTING, FEDERATION = small()
BY_HAND = partial(replace, SETTING)

test_wrong_calls_are_refused_by_name = refused(globals())("""
check_messages(3, SETTING, FEDERATION) -> ValueError: `method` must be a function at the top of a
check_messages(lambda of: of, SETTING, FEDERATION) -> ValueError: or its place, such as 'mine.py:me
check_messages(partial(nested), SETTING, FEDERATION) -> ValueError: `method` must be a function at
check_messages("no.py:x", SETTING, FEDERATION) -> ValueError: `method` must be a function at the top
check_messages(leaks.__file__ + ":x", SETTING, FEDERATION) -> TypeError: `method` must be a function
check_messages(fedprox, 3, FEDERATION) -> TypeError: `setting` must be a Setting
check_messages(fedprox, SETTING, 3) -> TypeError: `federation` must be a Federation
check_messages(fedprox, BY_HAND(rounds=0), FEDERATION) -> ValueError: `setting.rounds` must be at l
check_messages(fedprox, BY_HAND(augment=lambda x, g: x), FEDERATION) -> ValueError: `setting` must
check_messages(leaks.none, SETTING, FEDERATION) -> TypeError: `method` must be a Method(client, ser
check_messages(fedprox, SETTING, replace(FEDERATION, inputs=range(41))) -> TypeError: `inputs` must
""")
