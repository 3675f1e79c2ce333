"""FedLoRA: factors are trained as parts of the weights, and averaged one by one."""

from functools import partial

import pytest
import torch

import fedprompt as fp
from fedprompt.methods import METHODS, fedlora, fedvpt_d
from low_rank import ONE_ROUND, RATE, initial, mean, trained
from same import assert_same
from tiny_federations import last, parameters, vit_federation

pytestmark = pytest.mark.usefixtures("float64")


def test_the_server_has_the_means_of_both_factors():
    federation = vit_federation(**ONE_ROUND)
    found = parameters(last(fedlora, federation, learning_rate=RATE), 0)
    start = initial(federation)
    expected = mean(federation, [trained(federation, client, start) for client in range(5)])
    torch.testing.assert_close(list(found.values()), expected)


def test_fedvpt_d_of_a_setting_with_lora_is_fedlora():
    tuned = vit_federation(tune=partial(fp.tuning.lora, rank=2))
    values = [parameters(last(*of), 0) for of in ((fedvpt_d, tuned), (fedlora, vit_federation()))]
    assert_same(*values)


@pytest.mark.parametrize(
    "name", ["fedbabu", "fedper", "fedpr", "fedrep", "fedvpt", "fedex_lora", "full_tuning", "sgpt"]
)
def test_methods_that_name_prompts_or_choose_parts_refuse_a_setting_with_others(name):
    tuned = vit_federation(tune=partial(fp.tuning.lora, rank=2))
    with pytest.raises(ValueError, match="`tune` must be None for a method with parts of its own"):
        last(METHODS[name].make, tuned)
