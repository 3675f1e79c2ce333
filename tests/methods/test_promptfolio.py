"""PromptFolio: the share of the private context leads from PromptFL to local training."""

import pytest
import torch
import torch.nn.functional as F

import fedprompt as fp
from fedprompt.methods.promptfl import promptfl
from fedprompt.methods.promptfolio import promptfolio
from tiny_federations import clip_federation, last, parameters

SGD = {"make_optimizer": torch.optim.SGD}


@pytest.mark.usefixtures("float64")
def test_without_a_private_share_the_shared_context_is_that_of_promptfl():
    folio = last(promptfolio, clip_federation(**SGD), private_share=0.0, learning_rate=0.3)
    average = last(promptfl, clip_federation(**SGD), learning_rate=0.3)
    found = parameters(folio, 0)["shared.context"]
    expected = parameters(average, 0)["context.context"]
    torch.testing.assert_close(found, expected)
    assert not torch.equal(found, clip_federation().new_context().context)


@pytest.mark.parametrize("share", [0.25, 0.5])
def test_logits_are_cosines_to_both_texts_mixed_in_the_stated_proportion(share):
    """The mixture of two features of length 1 is shorter, and is not normalized again."""
    federation = clip_federation()
    model = last(promptfolio, federation, private_share=share).of(0)
    image = federation.inputs[:4, 0]
    texts = (fp.prompted_text(each(), model.names) for each in (model.shared, model.private))
    towers = (federation.tower(text)[0] for text in texts)
    shared, private = (F.cosine_similarity(image[:, None], each, dim=-1) for each in towers)
    expected = 10 * ((1 - share) * shared + share * private)
    torch.testing.assert_close(model(federation.inputs[:4]), expected)
    assert (model.text().norm(dim=1) < 0.999).all()
