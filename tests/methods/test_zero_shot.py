"""Zero-shot CLIP: its logits equal those of open_clip with the whole sentence."""

import torch
import torch.nn.functional as F

from clips import TOKENIZER
from fedprompt.methods.zero_shot import zero_shot
from tiny_federations import clip_federation, last


def test_logits_are_those_of_open_clip_and_nothing_is_trained():
    federation = clip_federation()
    predictions = last(zero_shot, federation)
    sentences = [f"a photo of a {name}." for name in federation.class_names]
    text = F.normalize(federation.clip.encode_text(TOKENIZER(sentences)), dim=-1)
    image = F.normalize(federation.inputs[:, 0], dim=-1)
    torch.testing.assert_close(
        predictions.of(0)(federation.inputs), federation.scale * image @ text.T
    )
    assert federation.ledger.total() == 0
