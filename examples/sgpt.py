"""SGPT: one global model whose images choose their own group prompts.

Twenty clients with two digits each, five of them in a round. All images share some prompts; each
image also selects one of ten groups of prompts by the nearest key (Deng et al., CVPR 2024)::

    python examples/sgpt.py
"""

from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

import digits
import fedprompt as fp
from embedded.vit import load_vit

NUM_CLIENTS, COHORT, NUM_GROUPS = 20, 5, 10


def main() -> None:
    quick = digits.parser(__doc__).parse_args().quick
    split = partial(fp.pathological, num_clients=NUM_CLIENTS, classes_per_client=2)
    federation = digits.federation(split, rounds=20, steps=8, quick=quick)
    torch.manual_seed(0)
    trunk = fp.vit_trunk(load_vit("B"))
    model = nn.ModuleDict(
        {
            "shared": fp.LayeredPrompts(8, trunk.dim, layers=(0, 1), patch_size=4),
            "groups": fp.GroupPrompts(NUM_GROUPS, 1, trunk.dim, layers=(2, 3), patch_size=4),
            "selector": fp.SelectionKeys(NUM_GROUPS, trunk.dim),
            "head": nn.Linear(trunk.dim, 10),
        }
    )
    shared, groups, selector, head = model.values()

    @torch.no_grad()
    def query_of(images: Tensor) -> Tensor:
        return fp.encode_prompted(trunk, images).pooled

    def logits_of(images: Tensor, *streams: fp.PromptStream) -> Tensor:
        return head(fp.encode_prompted(trunk, images, shared(), *streams).pooled)

    def predict(images: Tensor) -> Tensor:
        return logits_of(images, groups(selector(query_of(images)).indices))

    values, usage = fp.snapshot(model), torch.zeros(NUM_GROUPS)
    server = fp.update_by_name({"groups": fp.ema(decay=0.5), "selector": fp.ema(decay=0.5)})
    state = server.init(values)
    for server_round in (bar := tqdm(range(federation.rounds), unit="round")):
        payloads = []
        draw = fp.stream_generator(0, server_round=server_round, purpose="cohort")
        for client in fp.cohort(range(NUM_CLIENTS), size=COHORT, generator=draw):
            fp.load(model.train(), values)
            selector.start_round(usage)
            for block in ((shared, head), (groups, selector, head)):
                learned = [parameter for part in block for parameter in part.parameters()]
                optimizer = torch.optim.SGD(learned, 0.05, momentum=0.9)
                with fp.training_only(model, *block):
                    for images, labels in federation.batches(client, server_round, size=32):
                        if groups in block:
                            query = query_of(images)
                            chosen = selector(query).indices
                            loss = F.cross_entropy(logits_of(images, groups(chosen)), labels)
                            loss = loss + fp.key_loss(query, selector.keys, chosen)
                        else:
                            loss = F.cross_entropy(logits_of(images), labels)
                        optimizer.zero_grad()
                        loss.backward()
                        optimizer.step()
            rows = {"selector.keys": selector.counts}
            size = len(federation.shards[client])
            payloads.append(fp.collect(model, weight=size, rows=rows))
        mean = fp.weighted_mean(payloads)
        values, state = server.step(values, mean, state)
        usage = usage + mean["selector.keys"].weight
        fp.load(model.eval(), values)
        accuracy = federation.accuracy(predict)
        bar.write(f"round {server_round + 1}: {100 * accuracy:.1f} %")
    chosen = selector(query_of(federation.test_images)).indices
    table = fp.contingency_table(
        chosen, federation.test_labels, num_groups=NUM_GROUPS, num_classes=10
    )
    purity = table.amax(1).sum() / table.sum()
    print(
        f"One model recognizes {100 * accuracy:.1f} % of all digits, although no client has seen "
        f"more than two. Test images use {int(table.any(1).sum())} of {NUM_GROUPS} groups, and "
        f"{100 * purity:.0f} % of them belong to the largest class of their group."
    )


if __name__ == "__main__":
    main()
