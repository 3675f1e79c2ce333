"""A seal notices each change of a container, whatever its parts are."""

import pytest

from fedprompt._seals import Seal

CHANGES = {
    "another name for a part": lambda tree: tree.update(new=tree.pop("old")),
    "another order of the names": lambda tree: tree.update(count=tree.pop("count")),
    "another number": lambda tree: tree.update(count=2),
    "a longer list": lambda tree: tree["list"].append(1),
    "an exchange of a list": lambda tree: tree["list"].reverse(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_changed_container_breaks_the_seal(change):
    tree = {"count": 1, "list": [object(), object()], "old": object()}
    seal = Seal(tree)
    assert not seal.broken()
    change(tree)
    assert "another content of a" in seal.broken()
