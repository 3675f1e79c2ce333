"""Steps that methods share, and their names in the module where they were before."""

import torch
import torch.nn.functional as F

import fedprompt as fp
import tiny_federations as tiny
from fedprompt.methods import averaged, fedavg_client
from fedprompt.methods.steps import known_rows


def test_the_client_and_server_of_fedavg_are_the_loop_that_you_would_write():
    made = tiny.vit_federation(make_optimizer=torch.optim.SGD, cohort_size=2)
    model, plain = (made.new_model() for _ in range(2))
    method = averaged(model, fedavg_client(model, 0.1))
    (now, *_) = fp.run_rounds(method, made.data, [[0, 1]])
    weights = dict(plain.named_parameters())
    weights = {name: weight for name, weight in weights.items() if weight.requires_grad}
    first = {name: weight.detach().clone() for name, weight in weights.items()}
    total = dict.fromkeys(first, 0.0)
    for data in (made.data(client, 0) for client in (0, 1)):
        plain.load_state_dict(first, strict=False)
        for images, labels in data.batches():
            tiny.descend(F.cross_entropy(plain(images), labels), weights.values(), 0.1)
        for name in total:
            total[name] += weights[name].detach() * data.num_examples
    examples = sum(made.data(client, 0).num_examples for client in (0, 1))
    for name, value in now.server["values"].items():
        torch.testing.assert_close(value, total[name] / examples)


def test_rows_of_positive_weight_are_known_and_keep_their_classes():
    rows = torch.tensor([[1.0], [2.0], [3.0]])
    entries = [fp.Weighted(rows, torch.tensor(weights)) for weights in ([0, 0.5, 2], [1.0, 0, 0])]
    values, classes = known_rows(entries)
    assert (values.flatten().tolist(), classes.tolist()) == ([2, 3, 1], [1, 2, 0])
