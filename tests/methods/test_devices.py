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
    few = {"rounds": 2, "clients": [0, 1], "cohort_size": 2, "steps": 1}
    made = federation_of(entry, entry.families[0], **few)
    with other_device() as device, torch.device(device):
        for frozen in (*getattr(made, "trunks", ()), getattr(made, "clip", None)):
            move(frozen, str(device))
        setting = replace(made, device=str(device), public=made.public.to(device))
        method = entry.make(setting)
        for now in fp.run_rounds(method, setting.data, setting.cohorts()):
            fp.save_checkpoint(now, tmp_path / ("kept" if now.server_round else "first"))
        start = fp.load_checkpoint(tmp_path / "first")
        (again,) = fp.run_rounds(method, setting.data, setting.cohorts(), start=start)
        fp.save_checkpoint(again, tmp_path / "again")
    kept, again = (fp.load_checkpoint(tmp_path / part, device="cpu") for part in ("kept", "again"))
    assert_same(kept, again)
