"""The server of whichever federation the run is of, as a strategy."""

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

import fedprompt as fp
from federations import FEDERATIONS
from fedprompt import flower

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    federation, ledger = FEDERATIONS[str(context.run_config["federation"])](), fp.Ledger()

    def expect(client: int) -> fp.wire.Expected:
        return fp.wire.Expected(federation.payload_form(client), federation.fingerprint)

    wire = {
        "cohort": federation.cohort,
        "expect": expect,
        "max_bytes": 10**6,
        "patience": 300.0,
        "ledger": ledger,
    }
    strategy = flower.ServerStrategy(federation.server, **wire)
    strategy.start(grid, ArrayRecord(), num_rounds=federation.rounds, timeout=300.0)
    fp.save_checkpoint(
        {"answers": dict(strategy.answers), "state": strategy.state}, str(context.run_config["out"])
    )
    print(ledger.table())
