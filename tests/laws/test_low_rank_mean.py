"""Law of the mean of low-rank products, and wrong means that the law rejects."""

from functools import partial

import numpy as np
import pytest
import torch

from fedprompt import Weighted, weighted_mean
from fedprompt.aggregation import low_rank_mean
from refusals import refused
from same import assert_same
from tolerance import assert_near

PAIRS = {"W": ("B", "A")}
ROWS, RANK, COLUMNS = 4, 2, 5


def drawn(dtype=torch.float64):
    """Payloads with another weight each. Client k does not know row k of B; client 1 sends no A."""
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(0), dtype=dtype)
    payloads = []
    for client in range(4):
        b, weight = draw(ROWS, RANK), torch.full((ROWS,), 10.0 + 30 * client)
        b[client], weight[client] = torch.nan, 0
        whole = torch.tensor(10.0 + 30 * client)
        payload = {"B": Weighted(b, weight), "A": Weighted(draw(RANK, COLUMNS), whole)}
        payloads.append({"B": payload["B"]} if client == 1 else payload)
    return payloads


def means_and_residual_have_the_mean_of_products(mean, payloads):
    """A loop over clients, rows and columns. The means are those of the factors alone."""
    found = mean(payloads)
    assert_same({name: found[name] for name in ("B", "A")}, weighted_mean(payloads))
    change = found["B"].value.double() @ found["A"].value.double() + found["W"].value
    for row in range(ROWS):
        total, sums = 0.0, [0.0] * COLUMNS
        for payload in payloads:
            b, weight = payload["B"].value[row].tolist(), payload["B"].weight[row].item()
            if weight > 0 and "A" in payload:
                total += weight
                for column, a in enumerate(payload["A"].value.T.tolist()):
                    sums[column] += weight * sum(x * y for x, y in zip(b, a, strict=True))
        assert found["W"].weight[row].item() == total
        if total > 0:
            expected = torch.tensor(sums, dtype=torch.float64) / total
            assert_near(change[row], expected, dtype=found["W"].value.dtype)
        else:
            assert found["W"].value[row].tolist() == sums


law = means_and_residual_have_the_mean_of_products


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("clients", [slice(4), slice(1), slice(None, None, -1)])
def test_the_law_holds(clients, dtype):
    law(lambda payloads: low_rank_mean(iter(payloads), PAIRS), drawn(dtype)[clients])


def product_of_means(payloads):
    mean = low_rank_mean(payloads, PAIRS)
    return mean | {"W": mean["W"]._replace(value=torch.zeros_like(mean["W"].value))}


def by_weights(weights_of):
    """The mean of products with these weights of the rows of a payload."""

    def mean(payloads):
        found = low_rank_mean(payloads, PAIRS)
        whole = [payload for payload in payloads if "A" in payload]
        products = [payload["B"].value.nan_to_num() @ payload["A"].value for payload in whole]
        weights = torch.stack([weights_of(payload).double() for payload in whole])[..., None]
        total = (weights * torch.stack(products)).sum(0) / weights.sum(0)
        change = total - found["B"].value @ found["A"].value
        return found | {"W": found["W"]._replace(value=change)}

    return mean


WRONG = {
    "product of means": product_of_means,
    "clients count equally": by_weights(lambda payload: payload["B"].weight > 0),
    "unknown rows count as zeros": by_weights(lambda payload: payload["A"].weight.expand(ROWS)),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_the_law_rejects_wrong_means(wrong):
    law(by_weights(lambda payload: payload["B"].weight), drawn())  # the right one by this function
    with pytest.raises(AssertionError):
        law(WRONG[wrong], drawn())


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_a_truncated_residual_has_the_error_of_the_singular_values_left_out(rank):
    """By Eckart and Young, no matrix of this rank is nearer to the exact residual."""
    exact, cut = (low_rank_mean(drawn(), PAIRS, rank=each)["W"].value for each in (None, rank))
    sizes = np.linalg.svd(exact.numpy(), compute_uv=False)
    assert np.linalg.matrix_rank(cut.numpy(), tol=1e-12) == rank
    error = np.linalg.norm(exact.numpy() - cut.numpy())
    assert error == pytest.approx(np.sqrt((sizes[rank:] ** 2).sum()), abs=1e-12)


ONE = torch.tensor(1.0)
B, A = Weighted(torch.ones(3, 2), ONE), Weighted(torch.ones(2, 4), ONE)
SENT = [{"B": B, "A": A}]


def test_a_product_with_an_unknown_row_of_a_does_not_count():
    half = {"B": B, "A": Weighted(A.value, torch.tensor([1.0, 0.0]))}
    assert_same(low_rank_mean([half], PAIRS)["W"], Weighted(torch.zeros(3, 4), 0 * ONE))


WIDE = B._replace(weight=torch.ones(3, 2))
FAR = [
    {"B": Weighted(s * B.value.half(), ONE), "A": Weighted(s * 4e4 * A.value, ONE)} for s in (1, -1)
]

test_wrong_calls_are_refused_by_name = refused(globals())("""
low_rank_mean(SENT, {"W": ("B", "C")}) -> ValueError: `pairs['W']` must name two factors that a
low_rank_mean(SENT, {"W": "BA"}) -> TypeError: `pairs['W']` must be the names of two factors
low_rank_mean(SENT, {"W": ("B", 1)}) -> TypeError: `pairs['W'][1]` must be a string; got 1 (int).
low_rank_mean(SENT, [("B", "A")]) -> TypeError: `pairs` must map names to pairs of names; got
low_rank_mean(SENT, {"B": ("B", "A")}) -> ValueError: `pairs` must name residuals, which clients
low_rank_mean(SENT, {"W": ("A", "B")}) -> ValueError: `payloads[0]['A']` must have shape (rows, ra
low_rank_mean([{"B": WIDE, "A": A}], PAIRS) -> ValueError: `payloads[0]['B'].weight` must have one
low_rank_mean(FAR, PAIRS) -> ValueError: `pairs['W']` must have a residual within torch.float16, the
low_rank_mean(SENT, PAIRS, rank=0) -> ValueError: `rank` must be at least 1; got 0
low_rank_mean([], PAIRS) -> ValueError: `payloads` must hold at least one payload; got none.
low_rank_mean(SENT, {}) -> ValueError: `pairs` must hold at least one pair of names; got none.
low_rank_mean(SENT[0], PAIRS) -> TypeError: `payloads` must be an iterable of payloads; got one
low_rank_mean([B], PAIRS) -> TypeError: `payloads[0]` must map names to Weighted; got a W
""")
