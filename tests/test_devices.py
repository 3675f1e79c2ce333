"""The same round on a CPU and on a GPU (run those on a GPU with: pytest -m gpu)."""

from contextlib import nullcontext

import pytest
import torch

import fedprompt as fp
from fedprompt import samples
from other_device import other_device

# The stand-in for a GPU calls itself "meta".
DEVICES = ["meta", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_payload_is_on_its_device_until_it_is_encoded_and_equals_the_cpu(device, dtype):
    """Compare clipping, noise, codecs, robust aggregation and encoded bytes."""
    expected, expected_blob, _ = payload_results("cpu", dtype)
    with other_device() if device == "meta" else nullcontext():
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
        fp.weighted_mean(bounded)["head"],
        fp.heterogeneous_means([payload["head"] for payload in bounded], [2, 4, 4, 8, 2])[4],
        fp.aggregation.mixtures(bounded, torch.ones(1, 5))[0]["head"],
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


def test_a_seed_draws_on_the_cpu_also_under_another_default_device():
    with torch.device("meta"):  # has no generators
        labels = samples.digits(1).test_labels
    assert torch.equal(labels, samples.digits(1).test_labels)


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
