"""Wrong calls of the library: each argument of each public callable, replaced by wrong values.

Run it by hand, ``PYTHONPATH=tests/helpers python tests/wrong_calls.py``, in about a minute. With
beginnings of module names, such as ``transport wire``, it runs these modules only.

The good calls are those of the examples in the docstrings. One argument at a time is replaced by
general wrong values, and by near misses: its good value with NaN, another dtype or shape, a
missing name. Each call is one of

- *refused*: an error that the library raises, and that names the argument;
- *legal*: no error, and the value is documented as allowed by `LEGAL`;
- *foreign*: any other error, such as one of PyTorch;
- *silent*: no error, although the value is wrong.
"""

import fnmatch
import inspect
import linecache
import math
import os
import re
import resource
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import fedprompt as fp
from good_calls import GoodCall, good_calls, public_callables

GENERAL = """
None
True
-1
0
2
0.5
-0.5
float('nan')
float('inf')
1e308
1e-320
10**30
1j
np.complex64(1j)
np.float64('nan')
'x'
b'x'
[]
{}
[1]
[None]
{'a': 3}
{0: 3}
(1, 2, 3)
object()
int
lambda *args, **kwargs: None
iter(())
torch.Generator().manual_seed(0)
np.random.default_rng(0)
np.ones((2, 3))
np.array(['x', None], dtype=object)
torch.tensor(float('nan'))
torch.ones(0)
torch.ones(3)
torch.ones(2, 3, 4, 5, 6)
torch.ones(3).long()
torch.ones(3).bool()
torch.ones(2, 3).cfloat()
torch.ones(2, 3, device='meta')
torch.ones(2, 3).to_sparse()
fp.Weighted(torch.ones(2), torch.ones(2))
nn.Linear(2, 3)
""".strip().splitlines()

NEAR = {  # of a tensor
    "with NaN": lambda good: filled(good, float("nan")),
    "with infinity": lambda good: filled(good, float("inf")),
    "with 1e38": lambda good: filled(good, 1e38),
    "with -1": lambda good: filled(good, -1),
    "float64": lambda good: good.double(),
    "float16": lambda good: good.half(),
    "int64": lambda good: good.long(),
    "bool": lambda good: good.bool(),
    "complex": lambda good: good.to(torch.complex64),
    "on meta": lambda good: good.to("meta"),
    "sparse": lambda good: good.to_sparse(),
    "with an axis more": lambda good: good[None],
    "with an axis less": lambda good: good[0],
    "without its last column": lambda good: good[..., :-1],
    "without its first row": lambda good: good[1:],
    "without rows": lambda good: good[:0],
    "transposed": lambda good: good.mT,
}


class Outcome(NamedTuple):
    """One wrong call: what came of it, and the error if there was one."""

    kind: str
    call: str
    argument: str
    value: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind:8}{self.call}({self.argument}={self.value}): {self.text}"


def filled(good: Tensor, number: float) -> Tensor:
    """Replace the first number of a tensor."""
    if not good.is_floating_point() and number != -1:
        return good.double() * number
    wrong = good.detach().clone()
    wrong.view(-1)[:1] = number
    return wrong


def near_misses(good: Any, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Make values that differ from a good one in one place."""
    if isinstance(good, Tensor):
        for label, change in NEAR.items():
            try:
                yield label, change(good)
            except (RuntimeError, IndexError):  # such as a scalar without its first row
                continue
    elif isinstance(good, np.ndarray) and good.dtype != object:
        for label, wrong in near_misses(torch.from_numpy(good)):
            if wrong.device.type == "cpu" and wrong.layout == torch.strided:
                yield f"array {label}", wrong.numpy()
    elif depth < 3 and isinstance(good, Mapping | list | tuple) and len(good):
        yield from _with_another_part(good, depth)


def _with_another_part(good: Any, depth: int) -> Iterator[tuple[str, Any]]:
    keys = list(good) if isinstance(good, Mapping) else list(range(len(good)))
    if not hasattr(good, "_fields"):
        yield "without its first part", replaced(good, keys[0])
    if isinstance(good, Mapping):
        yield "with one more name", {**good, "another": good[keys[0]]}
        yield "with the name 0", {0: good[keys[0]], **good}
    for key in keys if hasattr(good, "_fields") else keys[:1]:
        name = good._fields[key] if hasattr(good, "_fields") else repr(key)
        for wrong in ("None", "float('nan')", "'x'", "-1", "object()", "torch.ones(7)"):
            yield f"with {wrong} as {name}", replaced(good, key, evaluated(wrong))
        for label, wrong in near_misses(good[key], depth + 1):
            yield f"with {name} {label}", replaced(good, key, wrong)


def replaced(good: Any, key: Any, *value: Any) -> Any:
    """Copy a mapping, list or tuple with another value in one place, or without it."""
    if isinstance(good, Mapping):
        kept = {name: part for name, part in good.items() if name != key}
        return kept | dict.fromkeys([key] * len(value), *value)
    parts = [*good[:key], *value, *good[key + 1 :]]
    return type(good)(*parts) if hasattr(good, "_fields") else type(good)(parts)


def evaluated(source: str) -> Any:
    return eval(source, {"torch": torch, "np": np, "nn": nn, "fp": fp})


def wrong_values(good: Any) -> Iterator[tuple[str, Any]]:
    """Make all wrong values for one argument, without those that equal the good one."""
    for source in GENERAL:
        yield source, evaluated(source)
    yield from near_misses(good)


def outcomes(call: GoodCall, every: int = 1) -> Iterator[Outcome]:
    """Replace each argument of a call by each wrong value, or by one of `every`."""
    for parameter in call.arguments.signature.parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            continue
        several = parameter.kind is parameter.VAR_POSITIONAL
        good = call.arguments.arguments.get(parameter.name, () if several else parameter.default)
        if several:
            good = good[0] if good else None
        for label, wrong in islice(wrong_values(good), None, None, every):
            new = call.copied()
            new.arguments.arguments[parameter.name] = (wrong,) if several else wrong
            yield outcome(new, parameter.name, label)


def outcome(call: GoodCall, argument: str, label: str) -> Outcome:
    """Make one call and classify it."""
    place = (call.name, argument, label)
    try:
        result = used(call.function(*ordered(call), **call.arguments.kwargs))
    except Exception as error:
        names = {argument}
        if label not in GENERAL:  # an error names one of two arguments that disagree
            names |= call.arguments.arguments.keys()
        kind = "refused" if is_refusal(error, names) else "foreign"
        return Outcome(kind, *place, f"{type(error).__name__}: {shown(error)}")
    legal = is_legal(call, argument, label) and (
        re.search("nan|inf|1e38", label.lower()) or finite((result, call.arguments.arguments))
    )
    return Outcome("legal" if legal else "silent", *place, f"gives {shown(result)}")


def ordered(call: GoodCall) -> tuple[Any, ...]:
    """Return the positional arguments in the order of the signature."""
    parameters = call.arguments.signature.parameters
    given = call.arguments.arguments
    call.arguments.arguments = {name: given[name] for name in parameters if name in given}
    return call.arguments.args


def used(result: Any) -> Any:
    """Run a generator or a context manager."""
    if isinstance(result, AbstractContextManager):
        with result:
            return result
    return list(islice(result, 10)) if inspect.isgenerator(result) else result


def shown(result: Any) -> str:
    """Return the text of a result or an error on one short line."""
    text = str(result) if isinstance(result, Exception) else repr(result)
    return re.sub(r"\s+", " ", text)[:150]


def is_refusal(error: Exception, names: set[str]) -> bool:
    """Whether the library raised an error, in a statement of its own, that names an argument."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    line = linecache.getline(last.filename, last.lineno or 0).strip()
    own = f"{os.sep}fedprompt{os.sep}" in last.filename and line.startswith("raise ")
    return own and any(re.search(rf"\b{name}\b", str(error)) for name in names)


NEAR_BY = re.compile(
    r".*(-1|1e38|float(16|64)|axis (more|less)|column|rows?|transposed|part|more name)"
    r"|.*with torch.ones\(7\) as .*"
)
"""Near misses that are good values, too, if they fit the other arguments."""

BY_TYPE = {
    "None": r"None|Optional",
    "True": r"\bbool\b",
    "2": r"\b(int|float|Any)\b",
    "0.5 1e308 1e-320": r"\bfloat\b",
    "'x'": r"\bstr\b",
    "torch.Generator*": r"Generator",
    "np.random*": r"numpy.*Generator",
    "lambda* int nn.Linear*": r"Callable|Solver|Selector|TransportScore|Aggregator|Any",
    "nn.Linear*": r"Module|Model",
    "iter(()) [] [1] (1,*": r"Iterable|Sequence",
    "int64 array_int64 torch.ones(3).long() torch.ones(3)": r"Integer|Real|Int\b|Iterable\[int",
    "bool torch.ones(3).bool()": r"Bool",
}
"""General values, and the annotations of arguments that may have them."""

NOT_FINITE = "with_NaN with_infinity torch.tensor(float('nan'))"

LEGAL = {
    # Numbers that may be 0 or negative.
    r".*\.(decay|smoothing|momentum|fraction|multiplier|weight|noise|framed|length|start)": "0",
    r".*\.(num_byzantine|num_prompts|server_round|client|size|min_size|seed|max_cosine)": "0",
    r".*\.(name_position|accuracies)|per_sample\.batch_size": "0",
    r".*\.max_cosine": "-1 -0.5",
    r"stream_generator\.seed": "10**30",
    # Trees, ids and parts that are not read; reports that say what is wrong.
    r"load_checkpoint\.default|save_checkpoint\.state|gather_trees\.tree": "*",
    r"check_text_encoder\.encoder|check_trunk\.trunk": "*",
    r"Ledger\.\w+\.client": "*",
    r"averaging_server\.<locals>\.answer\..*": "*",  # the step checks what an answer returns
    r"part\.message|named\.entries": "with_* {} {'a':_3}",
    r".*\.state": "{} *with_the_name_0",
    r"(coded|counted|run_rounds)\.method": "with_server_with_state_* with_None_as_form",
    r"(num_bytes|Ledger\.record)\.message": "{} with_*",
    # Forms, rows of weight 0 and robust rules: numbers that are not read, or may be anything.
    r"(multi_)?krum\.payloads|(trimmed_mean|weighted_median)\.entries": "*NaN *infinity",
    r".*\.(like|expect)|.*init\.payload": "*NaN *infinity *on_meta *None_as_* *int64 *bool",
    # Outputs of the user's model: the loss shows NaN, so a diverging run can be seen.
    r".*_loss\.(logits|other|guided)|cosine_logits\.(image|text)": NOT_FINITE,
    r"PromptGenerator\.forward\.keys|_Copies\.forward\.inputs": NOT_FINITE,
    r"precompute\.dataset": f"*{NOT_FINITE} *infinity torch.ones(* int64 bool complex",
    r"class_accuracy\.batches": "*NaN *infinity torch.ones(0)",
    # Other good values.
    r".*\.(names|class_names|header|domains|expect)": "*'x'_as_*",
    r"\w+\.(mean|history|arrivals)": "with_*-1_as_0",
    r".*\.(streams|payloads)|precompute\.dataset": "*with_the_name_0",
    r".*\.coupling": "*iterations_int64 *None_as_duals",
    r"TextTower\.__call__\.text|fingerprint\.streams": "*None_as_context *on_meta",
    r"(save|encode)_payload\.message": "{} *int64 *bool",
    r"(accuracy_matrix|transport_plan|partition)\..*": "*int64",
    r"check_trunk\.images": "on_meta",  # the report says what is wrong
    r"EachName\.(init|step)\.(previous|mean)": "{} torch.ones(*) fp.Weighted*",
    r"harmonic_mean\.accuracies": "1e308 1e-320",
    r"\w+_by_name\.rules|collect\.rows|load_values\.message|receive\.expect|.*step\.mean": "{}",
    r"class_means\.values": "torch.ones(*)",
    r"(labels_of|study_quiz_split)\..*": "[] [1] (1,* torch.ones(0) torch.ones(3).long()",
    r".*\.class_names": "[]",
    r"cohort\.clients": "np.array* fp.Weighted* with_*",
    r"group_usage\.counts|selection_health\.counts|plan_from_duals\.a": "torch.ones(3)",
    r"averaging\.clients|run_rounds\.cohorts|receive\.arrivals": "torch.ones(0)",
}
"""Expressions for ``callable.argument``, and the values that their documentation allows."""


def is_legal(call: GoodCall, argument: str, label: str) -> bool:
    """Whether a value is documented as allowed."""
    annotation = str(call.arguments.signature.parameters[argument].annotation)
    value = label.replace(" ", "_")
    if label not in GENERAL and NEAR_BY.fullmatch(label):
        return True
    place = f"{call.name}.{argument}"
    return any(
        re.search(types, annotation) and _fits(value, values) for values, types in BY_TYPE.items()
    ) or any(re.fullmatch(where, place) and _fits(value, values) for where, values in LEGAL.items())


def _fits(value: str, patterns: str) -> bool:
    """Whether a value has one of the forms, which are separated by spaces."""
    forms = (pattern.replace("[", "[[]") for pattern in patterns.split())
    return any(fnmatch.fnmatchcase(value, form) for form in forms)


def finite(thing: Any) -> bool:
    """Whether a result has neither NaN nor infinity."""
    if isinstance(thing, Tensor):
        dense = thing.layout == torch.strided and not thing.is_meta
        return not dense or bool(torch.isfinite(thing).all())
    if isinstance(thing, nn.Module):
        return all(map(finite, thing.parameters()))
    if isinstance(thing, Mapping):
        return all(map(finite, thing.values()))
    if isinstance(thing, tuple | list):  # the epsilon of a coupling may be infinite
        return all(finite(part) for part in thing if not isinstance(part, float))
    return not isinstance(thing, float) or math.isfinite(thing)


def main(modules: tuple[str, ...]) -> None:
    """Print the counts, then each silent and each foreign call."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_AS, (8 * 2**30, resource.RLIM_INFINITY))
    calls = good_calls(modules or ("",))
    if not modules:
        missing = set(public_callables()) - {call.name for call in calls}
        assert not missing, f"no good call of {sorted(missing)}"
    os.chdir(tempfile.mkdtemp())  # names of files are wrong values, too
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    counts: Counter[str] = Counter()
    for call in calls:
        good = call.copied()
        used(good.function(*ordered(good), **good.arguments.kwargs))
        for made in outcomes(call):
            counts[made.kind] += 1
            if made.kind in ("silent", "foreign"):
                print(made)
    print(f"{sum(counts.values())} calls: {dict(counts)}")


if __name__ == "__main__":
    main(tuple(sys.argv[1:]))
