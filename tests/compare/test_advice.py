"""The sentence of advice: the cheapest row that is not shown to be worse than the best one."""

from fedprompt.compare.advice import advice, chosen

ALONE = ["alone", "alone twice"]


def seeds(*own, sent=0, full=(), backward=0):
    columns = zip(own, full or own, strict=True)
    same = {"bytes_up": sent, "backward": backward}
    return [{"seed": n, "own": a, "full": b} | same for n, (a, b) in enumerate(columns)]


def test_the_cheapest_row_that_is_not_shown_to_be_worse_is_recommended():
    rows = {
        "alone": seeds(0.5, 0.5, 0.5, 0.5, 0.5),
        "head": seeds(0.70, 0.76, 0.70, 0.76, 0.70, sent=1),
        "scaffold": seeds(0.73, 0.74, 0.73, 0.74, 0.73, sent=2),
    }
    # scaffold is .01 above the head, whose differences have an interval of .026
    # gain: mean of 20, 26, 20, 26, 20; 2.776 * 3.286 / sqrt(5)
    assert chosen(rows, "own", ALONE, "training alone") == (
        "head (+22.4 ± 4.1 points to training alone)"
    )
    rows["head"] = seeds(0.70, 0.72, 0.71, 0.72, 0.70, sent=1)  # .024 below, interval .008
    assert chosen(rows, "own", ALONE, "").startswith("scaffold")
    rows["alone"] = seeds(0.73, 0.75, 0.73, 0.73, 0.74)
    assert chosen(rows, "own", ALONE, "") == "alone"


def test_equal_rows_are_chosen_by_bytes_and_one_common_seed_shows_nothing():
    rows = {"large": seeds(0.7, 0.8, sent=2), "small": seeds(0.7, 0.8, sent=1)}
    assert chosen(rows, "own", ALONE, "") == "small"  # no row of training alone
    rows["small"] = rows["small"][:1]
    assert chosen(rows, "own", ALONE, "") == "large"
    rows["large"] = seeds(0.8, 0.9, sent=2)
    rows["small"] = seeds(0.7, 0.9, sent=1)  # two common seeds, .05 below, interval .64
    assert chosen(rows, "own", ALONE, "") == "small"


def test_a_run_of_five_seeds_names_a_row_for_each_kind_of_test():
    rows = {
        "alone": seeds(*[0.5] * 5, full=[0.3] * 5, backward=1),
        "alone twice": seeds(*[0.6] * 5, full=[0.2] * 5, backward=2),
        "personal": seeds(*[0.9] * 5, full=[0.4] * 5, sent=3, backward=1),
        "shared": seeds(*[0.7] * 5, full=[0.8] * 5, sent=3, backward=2),
    }
    at = {"partition": "few", "trial": None}
    found = [record | at | {"row": row} for row, each in rows.items() for record in each]
    said = (
        "**Use** personal (+40.0 ± 0.0 points to words) for a client's images, "
        "and shared (+60.0 ± 0.0 points to words) for the images of all clients."
    )
    assert advice(found, "few", ALONE, "words") == said
    nothing = "This run recommends nothing: it takes 5 seeds, and the row alone."
    for few in (found[:-1], found[5:]):  # four seeds of a row; no row of training alone
        assert advice(few, "few", ALONE, "words") == nothing
    without = [record for record in found if record["row"] != "alone twice"]
    assert "shared (+50.0 ± 0.0 points" in advice(without, "few", ALONE, "words")
