"""The app of the SuperLink."""

from pathlib import Path

import torch
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

import fedprompt as fp
import task
from fedprompt import flower

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    config, ledger = context.run_config, fp.Ledger()
    method, federation, test_inputs, test_labels = task.load(config)
    folder = task.folder(config, "server")
    start = None if folder is None else fp.load_checkpoint(folder, default=None)
    options = {**task.wire(method), "start": start, "patience": 300.0, "ledger": ledger}
    strategy = flower.ServerStrategy(method, **options)

    def save(*_: object) -> None:
        if folder is not None:
            fp.save_checkpoint(strategy.now, folder)

    exchanges = (method.setting.rounds - 1 - strategy.now.server_round) * method.exchanges
    strategy.start(grid, ArrayRecord(), num_rounds=exchanges, timeout=300.0, evaluate_fn=save)
    folder = folder or Path(f"fedprompt-{context.run_id}").absolute()
    save()  # before the evaluation, whose error would lose the run
    print(f"{config['method']}: the last round is in {folder}")
    print(ledger.table())
    now, trained = strategy.now, method.setting.clients
    newcomers = [client for client in federation.shards if client not in trained]
    if now.stateful and not newcomers:
        print(f"{config['method']}: the models of clients are on their nodes")
        return
    client = (newcomers or list(trained))[0]
    model = now.model(method, federation, client)
    with torch.no_grad():
        accuracy = (model(test_inputs).argmax(1) == test_labels).float().mean().item()
    who = "a new client" if newcomers else "a client"
    print(f"{config['method']}: {who} classifies {accuracy:.1%} of the test digits")
