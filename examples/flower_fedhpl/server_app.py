"""The app of the SuperLink: a plain loop over Flower's grid."""

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

import federation
import fedprompt as fp
from fedprompt import flower

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    clients, server, ledger = range(len(federation.NAMES)), federation.Server(), fp.Ledger()
    answers, state = server.init()
    nodes: dict[int, int] = {}
    for server_round in range(federation.ARGS.rounds):
        nodes = flower.client_nodes(grid, clients, known=nodes, timeout=300.0)
        wire = {
            "expect": federation.expected_payload,
            "max_bytes": federation.MAX_BYTES,
            "timeout": 300.0,
            "ledger": ledger,
        }
        payloads = flower.run_round(grid, answers, nodes=nodes, server_round=server_round, **wire)
        answers, state = server.step(payloads, state)
    fp.save_checkpoint({"answers": answers, "payloads": payloads}, str(context.run_config["out"]))
    print(ledger.table())
