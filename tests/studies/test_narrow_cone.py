"""The study of keys in a narrow cone, on points and on the embedded digits."""

import numpy as np
import torch
import torch.nn.functional as F

from embedded.shifts import feature_shift
from studies import narrow_cone


def rows(capsys) -> list[list[str]]:
    """Return the cells of the printed table, without its head."""
    lines = capsys.readouterr().out.splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def points() -> narrow_cone.Photographs:
    """Draw four clusters, two for each domain, far from the origin."""
    generator = torch.Generator().manual_seed(0)
    cluster = torch.arange(200) % 4
    centers = torch.randn(4, 16, generator=generator)
    axis = F.normalize(torch.rand(16, generator=generator), dim=0)
    noise = 0.3 * torch.randn(200, 16, generator=generator)
    return narrow_cone.Photographs(centers[cluster] + noise + 27 * axis, cluster // 2)


def test_raw_and_rectified_queries_collapse_and_centered_ones_do_not(monkeypatch, capsys):
    monkeypatch.setattr(narrow_cone, "digits", points)
    monkeypatch.setattr(
        "sys.argv", ["narrow_cone.py", "--rounds", "2", "--steps", "8", "--seeds", "1"]
    )
    narrow_cone.main()
    table = {
        name: (float(cosine), groups, purity) for name, cosine, _, groups, purity in rows(capsys)
    }
    assert set(table) == {"raw", "ReLU", "centered"}
    for name, (cosine, groups, purity) in table.items():
        assert (cosine > 0.9) == (name != "centered")
        assert (float(groups) > 2.5) == (name == "centered")
        assert (float(purity) > 0.9) == (name == "centered")


def test_the_command_of_the_page_runs_on_the_digits(monkeypatch, capsys):
    flags = ["--rounds", "1", "--steps", "1", "2", "--seeds", "1"]
    monkeypatch.setattr("sys.argv", ["narrow_cone.py", *flags])
    narrow_cone.main()
    names = [(name, steps) for name, _, steps, _, _ in rows(capsys)]
    assert names == [(name, steps) for name in ("raw", "ReLU", "centered") for steps in "12"]


def test_feature_shift_gives_each_client_one_domain_and_each_domain_four_clients():
    federation = feature_shift(seed=0, num_clients=20, validate=False)
    for side in federation:
        if isinstance(side, int):
            continue
        domains = [side.truth[shard].unique().tolist() for shard in side.shards]
        assert domains == [[client % 5] for client in range(20)]
        assert sorted(np.concatenate(side.shards)) == list(range(len(side.labels)))
    raw, inverted = federation.train.truth == 3, federation.train.truth == 0
    images = torch.stack([federation.train.split.dataset[number][0] for number in range(len(raw))])
    # Ink is light on black, and dark on white.
    assert images[raw].mean() < 0.5 < images[inverted].mean()
