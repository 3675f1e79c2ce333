"""Costs of per-sample gradients and of noise.

With ``--check``, sizes are those below and ratios are asserted. Otherwise, batches are small.

The client trains deep prompts (ten tokens a layer) and a head. One pass of :func:`per_sample` is
compared with one pass of the plain model, with one backward pass a sample, and with the vmap of
``torch.func`` over the whole model. One model has images of 224 pixels. The other one is so small
that the launch of operators takes most of the time. Noise from the operating system's entropy is
compared with ``torch.randn`` in float64.
"""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer
from torch.func import functional_call, grad, vmap

import fedprompt as fp
from fedprompt.privacy._randomness import normal
from timed import Client, draw_images, labels_of, vit

pytestmark = [
    pytest.mark.benchmark,
    pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning"),
]


class Setting:
    """A batch and four ways to compute its gradients.

    All but the plain one return gradients of shape (batch, ...) by name.
    """

    def __init__(self, model, size, batch):
        self.client = Client(model)
        self.images = draw_images(batch, size)
        self.labels = labels_of(self.images)

    def plain(self):
        F.cross_entropy(self.client(self.images), self.labels).backward()
        self.client.zero_grad()

    def one_pass(self):
        copies = fp.privacy.per_sample(self.client, len(self.images))
        F.cross_entropy(copies(self.images), self.labels, reduction="sum").backward()
        return {name: parameter.grad for name, parameter in copies.named_parameters()}

    def loop(self):
        rows = []
        for image, label in zip(self.images.split(1), self.labels.split(1), strict=True):
            F.cross_entropy(self.client(image), label).backward()
            rows.append(
                {name: parameter.grad for name, parameter in self.client.named_parameters()}
            )
            self.client.zero_grad()
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}

    def vmapped(self):
        parameters = {
            name: parameter.detach() for name, parameter in self.client.named_parameters()
        }

        def own_loss(parameters, image, label):
            return F.cross_entropy(
                functional_call(self.client, parameters, (image[None],)), label[None]
            )

        return vmap(grad(own_loss), in_dims=(None, 0, 0))(parameters, self.images, self.labels)


SMALL = {"img_size": 16, "patch_size": 4, "embed_dim": 64, "depth": 4, "num_heads": 4}
SMALL |= {"num_classes": 0}
SETTINGS = {
    "ViT-Ti, 224 pixels": (vit, 224, 8),
    "4 layers of width 64, 16 pixels": (partial(VisionTransformer, **SMALL), 16, 64),
}
GOALS = {"ViT-Ti, 224 pixels": (1.1, 1.05), "4 layers of width 64, 16 pixels": (1.2, 4.0)}


@pytest.mark.parametrize("name", SETTINGS)
def test_per_sample_gradients(name, meter):
    """One pass for all samples, next to a loop and to vmap over the whole model."""
    model, size, batch = SETTINGS[name]
    setting = Setting(model(), size, meter.size(batch))
    to_plain, to_loop = GOALS[name]
    own, looped = setting.one_pass(), setting.loop()
    for key, gradient in looped.items():
        bound = 1e-4 * float(gradient.abs().max())
        torch.testing.assert_close(own[key], gradient, rtol=0, atol=bound)
    ratios = f"""
        one_pass / plain, time <= {to_plain}
        loop / one_pass, time >= {to_loop}
        vmapped / one_pass, time
        one_pass / plain, memory <= 1.1
        vmapped / one_pass, memory
    """
    calls = {way: getattr(setting, way) for way in ("plain", "one_pass", "loop", "vmapped")}
    meter.compare(f"{name}, batch of {len(setting.images)}: gradients", ratios, **calls)


@pytest.mark.parametrize("count", [10_000, 1_000_000])
def test_noise_from_the_operating_system(count, meter):
    """Compare :func:`noisy_mean` with and without a generator.

    Its random numbers alone are compared with ``torch.randn`` in float64 and in float32.
    """
    total = {"prompts": torch.zeros(count, dtype=torch.float64)}
    generator = torch.Generator().manual_seed(0)
    repeats = 10**6 // count
    noise = partial(
        fp.privacy.noisy_mean, total, multiplier=1.0, max_norm=1.0, expected_batch_size=1
    )

    def many(function):
        return lambda: [function() for _ in range(repeats)]

    found = meter.compare(
        f"{count:,} normal numbers",
        """
        ours / seeded, time <= 2.5
        deviates / randn, time <= 2.5
        deviates / single, time
        """,
        ours=many(noise),
        seeded=many(partial(noise, generator=generator)),
        deviates=many(partial(normal, (count,), generator=None)),
        randn=many(partial(torch.randn, count, generator=generator, dtype=torch.float64)),
        single=many(partial(torch.randn, count, generator=generator)),
    )
    speed = repeats * count / 1e6 / found["time"]["deviates"]
    meter.report(f"{count:,} normal numbers: millions per second", speed)
