"""Whole rounds of the papers' calls against slow loops, with epochs and incomplete batches."""

import re
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn as nn
from timm.models.vision_transformer import VisionTransformer

import fedprompt as fp
from clips import TOKENIZER
from fedprompt.interfaces import Coupling
from fedprompt.methods import Federation, papers
from fedprompt.methods.fedl2g import _drawn, _study_and_quiz
from references import coop
from references import fedhpl as hpl
from references import fedl2g as l2g
from references import fedotp as otp
from references import sgpt as gpt
from tiny_federations import clip_federation

SIZES = (7, 19, 33, 16)
SHARDS = dict(enumerate(torch.arange(sum(SIZES)).split(SIZES)))
NEAR = {"rtol": 0, "atol": 1e-12}
PAGES = Path(__file__).parents[2] / "docs" / "methods"


@pytest.fixture
def images(float64):
    """Images and labels of four clients, of whom two have no full batch of sixteen more."""
    draw = torch.Generator().manual_seed(0)
    pixels = torch.rand(sum(SIZES), 1, 8, 8, generator=draw, dtype=torch.float64)
    return Federation(pixels, torch.arange(sum(SIZES)) % 3, SHARDS)


def transformer(dim, depth):
    """A transformer whose prompts matter."""
    torch.manual_seed(dim)
    sizes = {"img_size": 8, "patch_size": 4, "in_chans": 1, "num_classes": 0, "num_heads": 2}
    network = VisionTransformer(embed_dim=dim, depth=depth, **sizes)
    with torch.no_grad():
        for weight in network.blocks.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.3)
    return fp.vit_trunk(network)


def cnn(width):
    """A convolutional network whose features have this width."""
    torch.manual_seed(width)
    layers = nn.Conv2d(1, width, 3, stride=2), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    network = nn.Sequential(*layers)
    network.num_features = width
    return network


def bordered(network, values, images, axes):
    """Put two learned pixels of mean 0.2 and deviation 0.5 around each image."""
    sides = ((values[f"prompts.{name}"] - 0.2) / 0.5 for name in ("columns", "rows"))
    columns, rows = (side.expand(len(images), -1, -1, -1) for side in sides)
    wide = torch.cat([columns[..., :2], images, columns[..., 2:]], 3)
    found = network(torch.cat([rows[:, :, :2], wide, rows[:, :, 2:]], 2))
    return found @ values["head.weight"].T + values["head.bias"]


@pytest.mark.parametrize(("epochs", "border"), [(1, False), (2, True)])
def test_fedhpl(images, epochs, border, monkeypatch):
    """Two networks of unlike width, with tokens or with a border of pixels."""
    changes = {"num_classes": 3, "clients": range(4), "rounds": 2, "epochs": epochs}
    if border:
        monkeypatch.setattr(hpl, "forward", bordered)
        changes["border"] = partial(fp.PadPrompts, 8, padding=2, mean=[0.2], std=[0.5])
        method = papers.fedhpl([cnn(4), cnn(6)], **changes)
    else:
        method = papers.fedhpl([transformer(8, 2), transformer(12, 3)], **changes)
    setting, nothing, axes = method.setting, torch.zeros(3, 3), hpl.Axes()
    kind = None if border else partial(fp.DeepPrompts, setting.num_prompts)
    values = {k: fp.snapshot(setting.new_model(k, prompts=kind)) for k in range(4)}
    known = {setting.width_of(k): (nothing, nothing[0]) for k in range(2)}
    start = values[1]
    for number, now in enumerate(fp.run_rounds(method, images)):
        sent = {}
        for k in range(4):
            data, dim = images.data(setting, k, number), setting.width_of(k)
            network = setting.networks[k % 2] if border else setting.trunk_of(k).model
            batches, (pixels, labels) = [*data.batches()], data.own()
            assert len(batches) == epochs * -(-SIZES[k] // 16)
            values[k] = hpl.train(network, values[k], batches, known[dim], axes)
            logits = hpl.forward(network, values[k], pixels, axes)
            sent[k] = hpl.Client(dim, [*logits], labels.tolist())
        known = {dim: hpl.teacher([*sent.values()], dim, 3, axes) for dim in known}
        for k in range(4):
            found = fp.snapshot(now.model(method, images, k))
            torch.testing.assert_close(found, dict(values[k]), **NEAR)
        for dim, teacher in known.items():
            torch.testing.assert_close(tuple(now.server[str(dim)]["logits"]), teacher, **NEAR)
    moved = "prompts.rows" if border else "prompts.tokens"
    assert (values[1][moved] - start[moved]).abs().max() > 1e-4


HALVES = {"shared_layers": [0, 1], "group_layers": [2, 3, 4]}


@pytest.mark.parametrize(
    ("domains", "depth", "layers"), [(None, 6, {}), (4, 6, {}), (None, 5, HALVES)]
)
def test_sgpt(images, domains, depth, layers):
    own = {"rounds": 2, "clients": range(4), "cohort_size": 3, "num_groups": 4, "epochs": 2}
    own |= {"batch_size": 8}
    changes = own if domains is None else {"rounds": 2, "epochs": 2, "batch_size": 8}
    trunk = transformer(8, depth)
    method = papers.sgpt(trunk, num_classes=3, domains=domains, **changes, **layers)
    setting = method.setting
    model = gpt.Model(trunk.model, replace=True, averaged=True, **layers)
    model = model._replace(query_depth=domains and 5)
    sgd = {"lr": 0.01, "momentum": 0.9, "weight_decay": 1e-5}
    now, usage = method.server.state["values"], [0.0] * 4
    for number, found in enumerate(fp.run_rounds(method, images)):
        cohort, sent = setting.cohort(number), []
        for client in cohort:
            data = images.data(setting, client, number)
            batches = [batch for phase in data.phases(2) for batch in phase]
            assert len(batches) == 2 * 2 * -(-SIZES[client] // 8)
            sent.append(gpt.trained(model, now, usage, batches, sgd))
        trained, counts = zip(*sent, strict=True)
        sizes = [SIZES[client] for client in cohort]
        now, before = gpt.server(model, now, trained, counts, sizes), now
        usage = [sum(each) for each in zip(usage, *counts, strict=True)]
        made = found.model(method, images, 0)
        torch.testing.assert_close(fp.snapshot(made), now, **NEAR)
        assert made.selector.usage.tolist() == usage
        assert (now["groups.tokens"] - before["groups.tokens"]).abs().max() > 1e-6


class Small(nn.Module):
    """A network with one hidden layer, or with two."""

    def __init__(self, is_deep):
        super().__init__()
        self.deep = nn.Linear(64, 64) if is_deep else nn.Identity()
        self.body, self.is_deep = nn.Linear(64, 6), is_deep

    def forward(self, images):
        points = images.flatten(1)
        return self.body(self.deep(points).tanh() if self.is_deep else points).tanh()


def named(values):
    return {name.removeprefix("prompts."): value for name, value in values.items()}


@pytest.mark.parametrize("by_features", [False, True])
def test_fedl2g(images, by_features):
    networks, clients = [partial(Small, False), partial(Small, True)], range(4)
    changes = {"num_classes": 3, "clients": clients, "rounds": 3, "num_features": 6}
    changes |= {"epochs": 2, "batch_size": 5, "warm_up": 1}
    method = papers.fedl2g(networks, by_features=by_features, **changes)
    setting, step = method.setting, l2g.sgd(0.01)
    models = {k: named(fp.snapshot(setting.new_model(k))) for k in clients}
    guides = method.server.state["guides"]
    for number, now in enumerate(fp.run_rounds(method, images)):
        sent, follows = [], number >= 1
        for k in clients:
            data = images.data(setting, k, number)
            positions, quiz = _study_and_quiz(data, 10)
            batches = [*data.batches(among=positions)] if follows else []
            assert len(batches) == follows * 2 * (len(positions) // 5)
            study = batches[-1] if batches else _drawn(data, positions)
            flat = [(pixels.flatten(1), own) for pixels, own in (*batches, study, quiz)]
            models[k], gradient = l2g.client_round(
                models[k], guides, flat[:-2], *flat[-2:], step,
                by_features=by_features, weight=1.0, followed=1.0 * follows,
            )  # fmt: skip
            sent.append((gradient, study[1]))
            found = named(fp.snapshot(now.model(method, images, k)))
            torch.testing.assert_close(found, dict(models[k]), **NEAR)
        rate, old = 100.0 if by_features else 0.1, guides
        guides = l2g.server_round(old, sent, rate=rate, max_norm=100.0)
        torch.testing.assert_close(now.server["guides"], guides, **NEAR)
        assert (guides - old).norm() > 1e-9


def literal(cost, a, b):
    """Algorithm 1 as a solver, one problem after the other."""
    plans = [otp.algorithm_1(one, a, b) for one in cost.flatten(0, 1)]
    plan = torch.stack(plans).reshape(cost.shape)
    error = (plan.sum(-1) / a - 1).clamp(min=0).amax(-1)
    return Coupling(plan, error, torch.zeros(cost.shape[:2], dtype=torch.int64), a, b, 0.1)


def scaled(cost, a, b, *, epsilon=0.1):
    """Algorithm 1 in the log domain, until no column's scale changes by 0.001 relatively."""
    kernel, new = -cost / epsilon, b.log() - (-cost / epsilon).logsumexp(0)
    for _ in range(99):
        rows = torch.minimum(a.log() - (kernel + new).logsumexp(1), torch.zeros(()))
        new, old = b.log() - (kernel + rows[:, None]).logsumexp(0), new
        if (new - old).abs().max() <= 1e-3:
            break
    return (kernel + rows[:, None] + new).exp()


@pytest.mark.filterwarnings("ignore:A transport plan violates")  # the paper stops before the end
@pytest.mark.parametrize(
    ("changes", "plan"), [({"solver": literal}, otp.algorithm_1), ({}, scaled)]
)
def test_fedotp(float64, changes, plan):
    """The block of the page has our stop of Algorithm 1; with `solver`, it is the printed one."""
    made, names = clip_federation(), ["cat", "dog", "polar bear"]
    federation = Federation(made.inputs, made.labels, made.shards)
    own = {"clients": [0, 1], "rounds": 2, "epochs": 2, "batch_size": 4, "scale": 100.0}
    method = papers.fedotp(made.tower, class_names=names, **own, **changes)
    setting = method.setting
    encode = partial(coop.text_features, made.clip, TOKENIZER, names=names, before=16)
    match = partial(otp.logits, scale=100.0, mass=0.8, plan=plan)
    sgd = {"learning_rate": 1e-3, "momentum": 0.9, "weight_decay": 5e-4}
    first = fp.snapshot(now_model(method, federation))
    shared, private = first["shared.context"], dict.fromkeys((0, 1), first["private.context"])
    for number, now in enumerate(fp.run_rounds(method, federation)):
        sent, total = [], 0
        for k in (0, 1):
            data = federation.data(setting, k, number)
            batches = [*data.batches()]
            assert len(batches) == 2 * -(-data.num_examples // 4)
            own, private[k] = otp.trained([shared, private[k]], batches, encode, match, **sgd)
            sent.append(own * data.num_examples)
            total += data.num_examples
        shared = sum(sent) / total
        for k in (0, 1):
            found = fp.snapshot(now.model(method, federation, k))
            torch.testing.assert_close(found["private.context"], private[k], **NEAR)
            torch.testing.assert_close(found["shared.context"], shared, **NEAR)
    assert (shared - first["shared.context"]).abs().max() > 1e-6


def now_model(method, federation):
    """Return the model before the first round."""
    start = fp.Round(0, method.server.state, {})
    return start.model(method, federation, 0)


@pytest.mark.parametrize("paper", ["fedhpl", "sgpt", "fedl2g", "fedotp"])
def test_the_block_of_the_page_is_the_call(paper):
    text = (PAGES / f"{paper}.md").read_text().split("\n## As in the paper\n")[1]
    (block, *_) = re.findall(r"```python\n(.*?)```", text, re.S)
    assert re.findall(r"methods\.(?!papers|Federation)(\w+)", block) == []
    assert f"methods.papers.{paper}(" in block
