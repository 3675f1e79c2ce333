"""Methods on a device that is not the CPU, a stand-in that refuses operands on two devices."""

from dataclasses import replace

import pytest
import torch

import fedprompt as fp
from fedprompt.compare.trials import move
from fedprompt.methods import METHODS
from other_device import other_device
from same import assert_same
from tiny_federations import federation_of


@pytest.mark.parametrize(
    "name", ["dpfpl", "fedapt", "fedprox", "fedsept", "pfedpg", "pfedpt", "scaffold"]
)
def test_a_method_runs_and_continues_on_another_device(name, tmp_path, new_models):
    """Private noise, keys, borders and descriptors once were drawn on the wrong device."""
    entry = METHODS[name]
    made = federation_of(entry, entry.families[0], rounds=3, cohort_size=2, steps=2)
    with other_device() as device, torch.device(device):
        for frozen in (*getattr(made, "trunks", ()), getattr(made, "clip", None)):
            move(frozen, str(device))
        setting = replace(made, device=str(device), public=made.public.to(device))
        method, kept = entry.make(setting), []
        for now in fp.run_rounds(method, setting.data, setting.cohorts()):
            if now.server_round < 2:
                fp.save_checkpoint(now, tmp_path)
            kept = [now]
        start = fp.load_checkpoint(tmp_path)
        (again,) = fp.run_rounds(method, setting.data, setting.cohorts(), start=start)
        fp.save_checkpoint(kept[0], tmp_path / "kept")
        fp.save_checkpoint(again, tmp_path / "again")
    kept, again = (fp.load_checkpoint(tmp_path / part, device="cpu") for part in ("kept", "again"))
    assert_same(kept, again)
