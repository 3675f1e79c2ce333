"""Numbers in messages by hand, for networks of two layers, and the bytes that the ledger counts.

A ViT has width 8, two prompts a layer and three classes, and a CLIP has a context of four tokens of
width 16. LoRA has A (2, 8) and B (24, 2) in each layer.
"""

import pytest

import tiny_federations as tiny
from fedprompt.methods import METHODS

HEAD, CONTEXT, A, B = 8 * 3 + 3, 4 * 16, 2 * 2 * 8, 2 * 24 * 2
# The method with its values, its federation, numbers up, tensors with a weight, numbers down alone.
SIZES = [
    ("fedclip", {}, tiny.clip_federation, 2 * 12 * 12 + 2 * 12, 4, 0),
    ("fedex_lora", {}, tiny.vit_federation, A + B + HEAD, 6, 2 * 24 * 8),  # and the weights
    ("fedlora", {}, tiny.vit_federation, A + B + HEAD, 6, 0),
    ("fedmaple", {}, tiny.clip_image_federation, 2 * CONTEXT + 2 * 16 * (16 + 1), 5, 0),
    ("fedotp", {}, tiny.clip_federation, CONTEXT, 1, 0),
    ("fedotp_average", {}, tiny.clip_federation, CONTEXT, 1, 0),
    ("fedotp_classical", {}, tiny.clip_federation, CONTEXT, 1, 0),
    ("fedplot", {"num_contexts": 2}, tiny.clip_federation, 2 * CONTEXT, 1, 0),
    ("fedsept", {"rank": 2}, tiny.clip_federation, 4 * 4 * 2, 1, 0),
    ("fedsa_lora", {}, tiny.vit_federation, A, 2, 0),
    ("fedvpt", {}, tiny.vit_federation, 2 * 8 + HEAD, 3, 0),
    ("fedvpt_d", {}, tiny.vit_federation, 2 * 2 * 8 + HEAD, 3, 0),
    ("flexlora", {}, tiny.vit_federation, A + B + HEAD, 6, 0),
    ("flexlora_exact", {}, tiny.vit_federation, A + B + HEAD, 6, 2 * 24 * 8),
    (
        "fedlora",
        {"sizes": dict.fromkeys(range(5), 1)},
        tiny.vit_federation,
        (A + B) // 2 + HEAD,
        6,
        0,
    ),
    ("ffa_lora", {}, tiny.vit_federation, B + HEAD, 4, 0),
    ("lg_fedavg", {}, tiny.mixed_federation, 3 * (6 + 1), 2, 0),
    ("pfedpg", {}, tiny.vit_federation, 2 * 8, 0, 0),
    ("pfedpt", {}, tiny.vit_federation, HEAD, 2, 0),
    ("promptfl", {}, tiny.clip_federation, CONTEXT, 1, 0),
    ("promptfl_fedper", {}, tiny.clip_federation, CONTEXT // 2, 1, 0),
    ("promptsrc", {}, tiny.clip_image_federation, 4 * CONTEXT, 2, 4 * CONTEXT),  # down twice
]


@pytest.mark.parametrize(("name", "values", "make", "numbers", "tensors", "more"), SIZES)
def test_messages_have_the_bytes_of_their_numbers(name, values, make, numbers, tensors, more):
    made = make(cohort_size=1)
    tiny.last(METHODS[name].make, made, **values)
    assert made.ledger.total(direction="down") == made.rounds * 4 * (numbers + more)
    assert made.ledger.total(direction="up") == made.rounds * 4 * (numbers + tensors)
