"""Devices follow the inputs: the same round on a CPU and on a GPU (run the latter with: pytest -m gpu)."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer

import fedprompt as fp

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_a_fedhpl_round_stays_on_its_device_and_equals_the_cpu(device):
    """One step, upload, aggregation, reply and distillation; float32 against the same round in float64 on the CPU."""
    expected, _ = round_loss("cpu", torch.float64)
    loss, tensors = round_loss(device, torch.float32)
    assert {tensor.device.type for tensor in tensors} == {device}
    assert loss.item() == pytest.approx(expected.item(), rel=1e-3)


def round_loss(device: str, dtype: torch.dtype) -> tuple[torch.Tensor, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    model = VisionTransformer(img_size=16, patch_size=4, num_classes=0, embed_dim=8, depth=2, num_heads=2)
    client = nn.ModuleDict({"prompts": fp.DeepPrompts(2, 8, 2), "head": nn.Linear(8, 4)})
    for parameter in (*model.parameters(), *client.parameters()):
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).mul(0.3).to(dtype)
    trunk, client = fp.vit_trunk(model.to(device)), client.to(device)
    images, labels = torch.randn(12, 3, 16, 16, generator=generator, dtype=torch.float64), torch.arange(12) % 4
    images, labels = images.to(device, dtype), labels.to(device)

    def logits() -> torch.Tensor:
        return client["head"](fp.encode_prompted(trunk, images, client["prompts"]()).pooled)

    means = fp.class_means(logits().detach(), labels, num_classes=4)
    teacher = fp.heterogeneous_means([means, means], [8, 16])[8]
    loss = F.cross_entropy(logits(), labels) + fp.distillation_loss(logits(), labels, teacher, temperature=2.0)
    loss.backward()
    with torch.no_grad():
        for parameter in client.parameters():
            parameter -= 0.1 * parameter.grad
    mean = fp.per_name()([fp.collect(client, weight=12), fp.collect(client, weight=3)])
    update = fp.per_name_update({"prompts": fp.ema(decay=0.5)})
    values = fp.snapshot(client)
    new, _ = update.step(values, mean, update.init(values))
    fp.load(client, new)
    final = fp.distillation_loss(logits(), labels, teacher, temperature=2.0)
    return final, [final, *teacher, *new.values(), *(tensor for upload in mean.values() for tensor in upload)]
