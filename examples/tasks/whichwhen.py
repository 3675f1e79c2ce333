"""Which method when: the rows that decide, on sample digits, and one recommendation."""

from functools import partial
from importlib.util import find_spec

from fedprompt.compare.advice import advice
from fedprompt.compare.rows import Row
from fedprompt.compare.trials import CompareError, Trial
from tasks import digits
from tasks.core import Machine, task
from tasks.tuning import draws, two_rates

LOCAL = Row.of("local").title
LORA = Row.of("fedlora", learning_rate=3e-3, rank=4)  # first, since it needs a package
OTHERS = ("local", "head_tuning", "fedvpt_d", "scaffold")
ROWS = [two_rates(row) for row in (LORA, *map(Row.of, OTHERS))]
RATES = {"fedlora": (3e-4, 3e-2)}


def make(partition: str, row: Row, *, seed: int, machine: Machine, validate: bool) -> Trial:
    """Divide the sample digits.

    Raises:
        CompareError: If a package is missing.
    """
    if row.method == "fedlora" and find_spec("peft") is None:
        rule = "needs PEFT: pip install -e '.[examples,peft]', or leave it out by --rows"
        raise CompareError(f"The row {row.title} {rule}.")
    where = {"seed": seed, "machine": machine, "validate": validate}
    return digits.make(partial(digits.vits, "S"), "domains", row, **where)


TASKS = {
    "which-when": task(
        "which-when",
        rows=lambda partition: ROWS,
        make=make,
        trials=lambda partition, row: draws(row, "which", RATES.get(str(row.method))),
        advice=partial(advice, references=[LOCAL], words="local training"),
    )
}
