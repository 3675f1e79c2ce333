"""Which method when: the recommendation."""

from fedprompt.compare import advice
from studies import digits


def test_few_seeds_recommend_nothing():
    at = {"partition": "example", "row": "Head tuning", "trial": None}
    found = [at | {"seed": 0, "own": 0.5, "bytes_up": 0}]
    for few in (found, found * advice.FEWEST):  # the second has no local training
        said = digits.TASKS["which-when"].advice(few, "example")
        assert said.startswith("This run recommends nothing")
