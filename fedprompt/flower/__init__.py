"""Adapter to Flower: client apps, rounds over a grid, and a strategy for any server.

This is the only package that imports flwr (extra ``flower``). ``import fedprompt`` does not import
it: use ``from fedprompt import flower``.
"""

from importlib import import_module

try:
    import_module("flwr.serverapp.strategy")  # the newest module that is used
except ImportError as error:
    needed = "`fedprompt.flower` needs flwr 1.41 or later: pip install 'fedprompt[flower]'"
    raise ImportError(needed) from error

from fedprompt.flower._records import pack, unpack
from fedprompt.flower._rounds import client_nodes, run_round
from fedprompt.flower.client import client_app
from fedprompt.flower.server import ServerStrategy

__all__ = ["ServerStrategy", "client_app", "client_nodes", "pack", "run_round", "unpack"]
