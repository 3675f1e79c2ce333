"""The same round on a CPU and on a GPU (run those on a GPU with: pytest -m gpu)."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer

import fedprompt as fp
from fedprompt import prompted_network, samples
from other_device import other_device

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_a_fedhpl_round_is_on_its_device_and_equals_the_cpu(device):
    """Compare a whole round in float32 with float64 on the CPU."""
    expected, _ = round_loss("cpu", torch.float64)
    loss, tensors = round_loss(device, torch.float32)
    assert {tensor.device.type for tensor in tensors} == {device}
    assert loss.item() == pytest.approx(expected.item(), rel=1e-3)


def round_loss(device: str, dtype: torch.dtype) -> tuple[torch.Tensor, list[torch.Tensor]]:
    trunk, generator = drawn_trunk(device, dtype)
    client = drawn(
        nn.ModuleDict({"prompts": fp.DeepPrompts(2, 8, 2), "head": nn.Linear(8, 4)}),
        generator,
        device,
        dtype,
    )
    images = torch.randn(12, 3, 16, 16, generator=generator, dtype=torch.float64)
    labels = torch.arange(12) % 4
    images, labels = images.to(device, dtype), labels.to(device)

    def logits() -> torch.Tensor:
        return client["head"](fp.encode_prompted(trunk, images, client["prompts"]()).pooled)

    means = fp.class_means(logits().detach(), labels, num_classes=4)
    teacher = fp.heterogeneous_means([means, means], [8, 16])[8]
    loss = F.cross_entropy(logits(), labels) + fp.distillation_loss(
        logits(), labels, teacher, temperature=2.0
    )
    loss.backward()
    with torch.no_grad():
        for parameter in client.parameters():
            parameter -= 0.1 * parameter.grad
    mean = fp.weighted_mean([fp.collect(client, weight=12), fp.collect(client, weight=3)])
    update = fp.update_by_name({"prompts": fp.ema(decay=0.5)})
    values = fp.snapshot(client)
    new, _ = update.step(values, mean, update.init(values))
    fp.load_values(client, new)
    final = fp.distillation_loss(logits(), labels, teacher, temperature=2.0)
    return final, [
        final,
        *teacher,
        *new.values(),
        *(tensor for entry in mean.values() for tensor in entry),
    ]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_payload_is_on_its_device_until_it_is_encoded_and_equals_the_cpu(device, dtype):
    """Compare clipping, noise, codecs, robust aggregation and encoded bytes."""
    expected, expected_blob, _ = payload_results("cpu", dtype)
    results, blob, noise = payload_results(device, dtype)
    assert {tensor.device.type for tensor in results} == {device}
    assert blob == expected_blob
    assert {tensor.device.type for tensor in noise} == {device}
    for tensor, wanted in zip(results, expected, strict=True):
        torch.testing.assert_close(tensor.cpu(), wanted)


def payload_results(
    device: str, dtype: torch.dtype
) -> tuple[list[torch.Tensor], bytes, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    payloads = []
    for client in range(5):
        weight = torch.tensor([1.0 + client, 0.0, 20.0])
        value = torch.randn(3, 4, generator=generator).to(device, dtype)
        payloads.append({"head": fp.Weighted(value, weight.to(device))})
    blob = fp.wire.encode_payload(payloads[0], header=fp.wire.Header())
    bounded = [
        fp.privacy.cap_weight(fp.privacy.clip_norm(payload, max_norm=1.0), max_weight=3)
        for payload in payloads
    ]
    results = [
        fp.robust.weighted_median([payload["head"] for payload in bounded]),
        fp.robust.trimmed_mean([p["head"] for p in bounded], fraction=0.2),
    ]
    results += [
        fp.robust.krum(bounded, num_byzantine=1)["head"],
        fp.robust.multi_krum(bounded, num_byzantine=1, num_selected=3)["head"],
    ]
    for codec in (fp.codecs.float16(), fp.codecs.int8(), fp.codecs.top_k(fraction=0.5)):
        message, _ = codec.encode(bounded[0], codec.init(bounded[0]))
        results.append(codec.decode(message, like=bounded[0])["head"])
    results.append(
        fp.privacy.from_sum(sum(map(fp.privacy.to_summable, bounded)), like=bounded[0])["head"]
    )
    noisy = fp.privacy.gaussian_noise(
        bounded[0], multiplier=1.0, sensitivity=1.0, generator=torch.Generator().manual_seed(1)
    )["head"]
    return [tensor for entry in results for tensor in entry], blob, list(noisy)


def drawn_trunk(device: str, dtype: torch.dtype) -> tuple[fp.interfaces.Trunk, torch.Generator]:
    generator = torch.Generator().manual_seed(0)
    model = VisionTransformer(
        img_size=16, patch_size=4, num_classes=0, embed_dim=8, depth=2, num_heads=2
    )
    return fp.vit_trunk(drawn(model, generator, device, dtype)), generator


def drawn(
    module: nn.Module, generator: torch.Generator, device: str, dtype: torch.dtype
) -> nn.Module:
    """Draw every parameter in float64 on the CPU, then convert the module."""
    for parameter in module.parameters():
        parameter.data = (
            torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            .mul(0.3)
            .to(dtype)
        )
    return module.to(device)


def test_a_seed_draws_on_the_cpu_also_under_another_default_device():
    clip = samples.clip()
    with torch.device("meta"):  # has no generators
        labels = samples.digits(1).test_labels
        images = prompted_network._images(clip.visual)
    assert torch.equal(labels, samples.digits(1).test_labels)
    assert torch.equal(images, prompted_network._images(clip.visual))


def test_a_device_that_this_machine_lacks_is_refused_by_name(tmp_path):
    with other_device() as device, torch.device(device):
        fp.save_checkpoint({"values": torch.zeros(2)}, tmp_path)
    assert fp.load_checkpoint(tmp_path, device="cpu")["values"].tolist() == [0, 0]
    with pytest.raises(ValueError, match=r"`device` must be one of this machine.*got cuda:99"):
        fp.load_checkpoint(tmp_path, device="cuda:99")


def test_a_server_rule_takes_a_mean_that_arrives_on_another_device():
    entry = fp.Weighted(torch.tensor([2.0, 3.0]), torch.tensor([1.0, 0.0]))
    with other_device() as device:
        previous = torch.zeros(2, device=device)
        for rule in (fp.overwrite(), fp.aggregation.adam(learning_rate=1.0)):
            new, _ = rule.step(previous, entry, rule.init(previous))
            assert new.device == previous.device
        new, _ = fp.overwrite().step(previous, entry, fp.overwrite().init(previous))
        assert new.cpu().tolist() == [2, 0]
