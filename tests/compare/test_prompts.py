"""Files of trained prompts, which are loaded into the models of all methods."""

from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch

import fedprompt as fp
from fedprompt.compare import prompts
from fedprompt.methods import METHODS, ClipSetting, VitSetting
from method_runs import RUNS
from refusals import refused
from tiny_federations import federation_of, vit_federation

CASES = [pair for pair in RUNS if pair[1] != "mixed models" and pair[0] != "zero_shot"]


@pytest.mark.unhooked  # methods of CLIP take a setting that their annotations do not name
@pytest.mark.parametrize(("name", "family"), CASES)
def test_a_file_makes_the_model_that_was_saved(name, family, tmp_path):
    entry = METHODS[name]
    federation = federation_of(
        entry, family, rounds=1, steps=1, clients=[0, 1], cohort_size=2, seed=3
    )
    method, shared = entry.make(federation), "personalized" not in entry.traits
    *_, now = fp.run_rounds(method, federation.data, federation.cohorts())
    trial = SimpleNamespace(setting=federation, federation=federation, names=())
    path = prompts.save(tmp_path, "mine", shared, trial, method, now)[-1]
    trained = now.model(method, federation.data(0 if shared else 1, now.server_round)).eval()
    kind, images = ClipSetting if family == "CLIP" else VitSetting, federation.inputs[:3]
    own = {field.name for field in fields(kind) if field.init} - {"seed", "cohort_size"}
    setting = kind(**{name: getattr(federation, name) for name in own})
    model = prompts.load(path, name, setting, images, seed=3, client=0 if shared else 1)
    with torch.no_grad():
        assert torch.equal(model(images), trained(images))


def predicts_by_a_function(setting):
    return fp.Method(lambda *_: ({}, {}), fp.averaging_server({}), lambda *_: torch.sign)


def load(method="fedprox", inputs=None):
    made = vit_federation()
    inputs = made.inputs[:1] if inputs is None else inputs
    return prompts.load("none.safetensors", method, made, inputs, seed=0)


test_wrong_calls_are_refused_by_name = refused(globals())("""
load(predicts_by_a_function) -> TypeError: `method` must predict with a module, which has a file;
load(inputs=[1]) -> TypeError: `inputs` must be inputs of the network; got a list of length 1.
""")
