"""Laws of the mean of low-rank products, and wrong means that the laws reject."""

from functools import partial

import numpy as np
import pytest
import torch

from fedprompt import Weighted, low_rank_mean, weighted_mean
from refusals import check_refused, refusals
from same import assert_same
from tolerance import assert_near

PAIRS = {"W": ("B", "A")}
ROWS, RANK, COLUMNS = 4, 2, 5


def drawn(*, clients=4, dtype=torch.float64):
    """Payloads with another size each. Client k does not know row k of B; client 1 sends no A."""
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    payloads = []
    for client in range(clients):
        b, weight = draw(ROWS, RANK), torch.full((ROWS,), 10.0 + 30 * client)
        b[client], weight[client] = torch.nan, 0
        one = torch.tensor(10.0 + 30 * client)
        payload = {"B": Weighted(b.to(dtype), weight), "head": Weighted(draw(3).to(dtype), one)}
        if client != 1:
            payload["A"] = Weighted(draw(RANK, COLUMNS).to(dtype), one)
        payloads.append(payload)
    return payloads


def effective(mean):
    """Return the change of the weight with which clients begin the next round."""
    return mean["B"].value.double() @ mean["A"].value.double() + mean["W"].value.double()


def the_change_is_the_mean_of_products(mean, payloads):
    """A loop over clients, rows and columns, in float64."""
    change, weights = effective(mean(payloads)), mean(payloads)["W"].weight
    for row in range(ROWS):
        total, sums = 0.0, [0.0] * COLUMNS
        for payload in payloads:
            b, weight = payload["B"].value[row].tolist(), payload["B"].weight[row].item()
            if weight > 0 and "A" in payload:
                total += weight
                for column, a in enumerate(payload["A"].value.T.tolist()):
                    sums[column] += weight * sum(x * y for x, y in zip(b, a, strict=True))
        assert weights[row].item() == total
        expected = torch.tensor([each / total for each in sums], dtype=torch.float64)
        assert_near(change[row], expected, dtype=payloads[0]["B"].value.dtype)


def all_other_names_have_the_weighted_mean(mean, payloads):
    found = mean(payloads)
    assert_same({name: found[name] for name in ("B", "head", "A")}, weighted_mean(payloads))


def one_client_has_no_residual(mean, payloads):
    assert mean(payloads[:1])["W"].value.abs().max() < 1e-6
    assert mean(payloads[:1])["W"].value[0].tolist() == [0.0] * COLUMNS  # the unknown row


def order_does_not_matter(mean, payloads):
    assert_near(mean(payloads[::-1])["W"].value, mean(payloads)["W"].value)


def splitting_a_client_changes_nothing(mean, payloads):
    parts = [
        {name: entry._replace(weight=share * entry.weight) for name, entry in payloads[0].items()}
        for share in (0.25, 0.75)
    ]
    assert_near(mean([*parts, *payloads[1:]])["W"].value, mean(payloads)["W"].value)


LAWS = [
    the_change_is_the_mean_of_products,
    all_other_names_have_the_weighted_mean,
    one_client_has_no_residual,
    order_does_not_matter,
    splitting_a_client_changes_nothing,
]


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_law_holds(law, dtype):
    law(lambda payloads: low_rank_mean(iter(payloads), PAIRS), drawn(dtype=dtype))


def product_of_means(payloads):
    mean = low_rank_mean(payloads, PAIRS)
    return mean | {"W": mean["W"]._replace(value=torch.zeros_like(mean["W"].value))}


def product_as_residual(payloads):
    mean = low_rank_mean(payloads, PAIRS)
    return mean | {"W": mean["W"]._replace(value=effective(mean))}


def equal_clients(payloads):
    return low_rank_mean(
        [
            {name: Weighted(each.value, (each.weight > 0).float()) for name, each in one.items()}
            for one in payloads
        ],
        PAIRS,
    )


def unknown_rows_as_zeros(payloads):
    changed = []
    for payload in payloads:
        b = payload["B"]
        whole = Weighted(b.value.nan_to_num(0.0), b.weight.max().expand(ROWS).clone())
        changed.append(payload | {"B": whole})
    return low_rank_mean(changed, PAIRS)


def factors_of_the_last_client(payloads):
    mean = low_rank_mean(payloads, PAIRS)
    b, change = payloads[-1]["B"].value.nan_to_num(0.0), effective(mean)
    value = change - b @ mean["A"].value
    return mean | {"B": mean["B"]._replace(value=b), "W": mean["W"]._replace(value=value)}


WRONG = {
    product_of_means: the_change_is_the_mean_of_products,
    equal_clients: the_change_is_the_mean_of_products,
    unknown_rows_as_zeros: the_change_is_the_mean_of_products,
    factors_of_the_last_client: all_other_names_have_the_weighted_mean,
    product_as_residual: one_client_has_no_residual,
}


@pytest.mark.parametrize(("wrong", "law"), WRONG.items(), ids=lambda each: each.__name__)
def test_laws_reject_known_wrong_means(wrong, law):
    with pytest.raises(AssertionError):
        law(wrong, drawn())


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_a_truncated_residual_has_the_error_of_the_singular_values_left_out(rank):
    """By Eckart and Young, no matrix of this rank is nearer to the exact residual."""
    exact, cut = (low_rank_mean(drawn(), PAIRS, rank=each)["W"].value for each in (None, rank))
    sizes = np.linalg.svd(exact.numpy(), compute_uv=False)
    assert np.linalg.matrix_rank(cut.numpy(), tol=1e-12) == min(rank, ROWS)
    error = np.linalg.norm(exact.numpy() - cut.numpy())
    assert error == pytest.approx(np.sqrt((sizes[rank:] ** 2).sum()), abs=1e-12)


ONE = torch.tensor(1.0)
B, A = Weighted(torch.ones(3, 2), ONE), Weighted(torch.ones(2, 4), ONE)
SENT = [{"B": B, "A": A}]
WIDE = B._replace(weight=torch.ones(3, 2))

REFUSED = """
low_rank_mean(SENT, {"W": ("B", "C")}) -> ValueError: `pairs['W']` must name two factors that a
low_rank_mean(SENT, {"W": "BA"}) -> TypeError: `pairs['W']` must be the names of two factors
low_rank_mean(SENT, [("B", "A")]) -> TypeError: `pairs` must map names to pairs of names; got
low_rank_mean(SENT, {"B": ("B", "A")}) -> ValueError: `pairs` must name residuals, which clients
low_rank_mean(SENT, {"W": ("A", "B")}) -> ValueError: `payloads[0]['A']` must have shape (rows, ra
low_rank_mean([{"B": WIDE, "A": A}], PAIRS) -> ValueError: `payloads[0]['B'].weight` must have one
low_rank_mean(SENT, PAIRS, rank=0) -> ValueError: `rank` must be at least 1; got 0
low_rank_mean([], PAIRS) -> ValueError: `entries` must hold at least one entry or payload; got none
low_rank_mean(SENT[0], PAIRS) -> TypeError: `payloads` must be an iterable of payloads; got one
low_rank_mean([B], PAIRS) -> TypeError: `payloads[0]` must map names to Weighted; got an entry
"""


@pytest.mark.bad_input
@pytest.mark.parametrize(("call", "error", "message"), refusals(REFUSED))
def test_wrong_calls_are_refused_by_name(call, error, message):
    check_refused(call, error, message, globals())
