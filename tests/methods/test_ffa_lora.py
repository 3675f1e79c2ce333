"""FFA-LoRA: only B and the head are trained, so the mean of products is the product of means."""

import pytest
import torch

from fedprompt.methods.ffa_lora import ffa_lora
from low_rank import ONE_ROUND, RATE, initial, mean, trained
from tiny_federations import last, vit_federation

pytestmark = pytest.mark.usefixtures("float64")


def test_a_stays_as_it_was_drawn_and_the_products_have_the_mean_of_the_clients():
    federation = vit_federation(**ONE_ROUND)
    model = last(ffa_lora, federation, learning_rate=RATE).of(0)
    start = initial(federation)
    sent = [trained(federation, client, start, skip=(2, 4)) for client in range(5)]
    expected = mean(federation, [[b @ a for a, b in (each[2:4], each[4:])] for each in sent])
    for block, product in zip(model.trunk.model.blocks, expected, strict=True):
        qkv = block.attn.qkv
        found = qkv.lora_B["default"].weight @ qkv.lora_A["default"].weight
        torch.testing.assert_close(found.detach(), product)
    torch.testing.assert_close(model.head.bias.detach(), mean(federation, sent)[1])
