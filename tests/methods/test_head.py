"""Head tuning: logistic regression on frozen features, averaged."""

import torch
import torch.nn.functional as F

from fedprompt.methods.head import head_tuning
from tiny_federations import descend, last, parameters, vit_federation


def test_it_is_federated_logistic_regression_on_the_features_of_the_trunk():
    federation = vit_federation(cohort_size=5, rounds=1, make_optimizer=torch.optim.SGD)
    found = parameters(last(head_tuning, federation, learning_rate=0.5), 0)
    trunk_alone = federation.new_model(prompts=lambda trunk: None)
    first = [trunk_alone.head.weight.detach(), trunk_alone.head.bias.detach()]
    weight, bias, total = 0.0, 0.0, 0
    for client in range(5):
        own = [each.clone().requires_grad_() for each in first]
        for images, labels in federation.batches(client, 0):
            with torch.no_grad():
                features = trunk_alone.features(images)
            loss = F.cross_entropy(features @ own[0].T + own[1], labels)
            descend(loss, own, 0.5)
        count = federation.num_examples(client)
        weight, bias, total = weight + count * own[0], bias + count * own[1], total + count
    assert set(found) == {"head.weight", "head.bias"}
    torch.testing.assert_close(found["head.weight"], (weight / total).detach())
    torch.testing.assert_close(found["head.bias"], (bias / total).detach())
