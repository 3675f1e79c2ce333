"""Adapter to Flower: our messages in its records, one round over its grid, and a strategy around any server.

The only room that knows flwr (extra ``flower``), and the only one that ``import fedprompt`` leaves alone: ``from fedprompt import flower``.
"""

from importlib import import_module

try:
    import_module("flwr.serverapp.strategy")  # the youngest of what is needed
except ImportError as error:
    raise ImportError(
        "`fedprompt.flower` needs flwr 1.41 or later: pip install 'fedprompt[flower]'"
    ) from error

from fedprompt.flower.client import client_app
from fedprompt.flower.records import pack, unpack
from fedprompt.flower.rounds import client_nodes, run_round
from fedprompt.flower.server import ServerStrategy

__all__ = ["ServerStrategy", "client_app", "client_nodes", "pack", "run_round", "unpack"]
