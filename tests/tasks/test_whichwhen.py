"""Which method when: the recommendation."""

from fedprompt.compare import advice
from tasks import digits

HEAD, SCAFFOLD = "Head tuning", "SCAFFOLD"


def seeds(*own, sent=0):
    return [{"seed": n, "own": each, "bytes_up": sent} for n, each in enumerate(own)]


def test_the_cheapest_row_that_is_not_shown_to_be_worse_is_recommended():
    rows = {
        digits.LOCAL: seeds(0.5, 0.5, 0.5, 0.5, 0.5),
        HEAD: seeds(0.70, 0.76, 0.70, 0.76, 0.70, sent=1),
        SCAFFOLD: seeds(0.73, 0.74, 0.73, 0.74, 0.73, sent=2),
    }
    # SCAFFOLD is .01 above the head, whose differences have an interval of .026
    gain = "+22.4 ± 4.1 points"  # mean of 20, 26, 20, 26, 20; 2.776 * 3.286 / sqrt(5)
    assert (
        advice.chosen(rows, "own", [digits.LOCAL], "local training")
        == f"{HEAD} ({gain} to local training)"
    )
    rows[HEAD] = seeds(0.70, 0.72, 0.71, 0.72, 0.70, sent=1)  # .024 below, interval .008
    assert advice.chosen(rows, "own", [digits.LOCAL], "local training").startswith(SCAFFOLD)
    rows[digits.LOCAL] = seeds(0.73, 0.75, 0.73, 0.73, 0.74)
    assert advice.chosen(rows, "own", [digits.LOCAL], "local training") == digits.LOCAL


def test_few_seeds_recommend_nothing():
    found = [record | {"partition": "example", "row": HEAD, "trial": None} for record in seeds(0.5)]
    for few in (found, found * advice.FEWEST):  # the second has no local training
        said = digits.TASKS["which-when"].advice(few, "example")
        assert said.startswith("This run recommends nothing")
