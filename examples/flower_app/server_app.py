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
    made = task.load(config)
    method, trained = made.method, made.method.setting.clients
    folder = task.folder(config, "server")
    start = None if folder is None else fp.load_checkpoint(folder, default=None)
    options = {**task.wire(method), "start": start, "patience": 300.0, "ledger": ledger}
    strategy = flower.ServerStrategy(method, tested=trained, best_by=config["best"], **options)

    def save(*_: object) -> None:
        if folder is not None:
            fp.save_checkpoint(strategy.now, folder)

    exchanges = (method.setting.rounds - 1 - strategy.now.server_round) * method.exchanges
    strategy.start(grid, ArrayRecord(), num_rounds=exchanges, timeout=300.0, evaluate_fn=save)
    folder = folder or Path(f"fedprompt-{context.run_id}").absolute()
    save()  # before the test of a new client, whose error would lose the run
    print(f"{config['method']}: the last round is in {folder}")
    if strategy.best is not None:
        best, figures = strategy.best.now.server_round, strategy.best.figures
        fp.save_checkpoint(strategy.best.now, folder.with_name(f"{folder.name}-best"))
        print(
            f"{config['method']}: clients classify {figures['accuracy']:.1%} of their own tests "
            f"after round {best}, the best one (balanced: {figures['balanced_accuracy']:.1%})"
        )
    print(ledger.table())
    shards = made.federation.shards if made.federation else {}
    for client in [client for client in shards if client not in trained][:1]:
        model, (inputs, labels) = (
            strategy.now.model(method, made.federation, client),
            made.tests(client),
        )
        with torch.no_grad():
            accuracy = (model(inputs).argmax(1) == labels).float().mean().item()
        print(f"{config['method']}: a new client classifies {accuracy:.1%} of its own tests")
