"""Which prompt a sample gets: keys that queries choose, what keeps all keys in use, and how to see whether they are."""

from fedprompt.selection.balanced import balanced_keys
from fedprompt.selection.health import contingency_table, revive_keys, selection_health
from fedprompt.selection.keys import SelectionKeys, key_loss, orthogonal_keys
from fedprompt.selection.nearest import nearest_keys

__all__ = [
    "SelectionKeys",
    "balanced_keys",
    "contingency_table",
    "key_loss",
    "nearest_keys",
    "orthogonal_keys",
    "revive_keys",
    "selection_health",
]
