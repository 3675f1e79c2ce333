"""FedHPL in a plain loop, in Flower's simulation, and on a SuperLink with three SuperNodes.

The results of the three runs are bitwise identical.

It requires Flower. A separate environment is best, because Flower requires older packages::

    pip install -e ".[examples,flower-sim]"
    python examples/flower_fedhpl/run.py                      # both engines
    python examples/flower_fedhpl/run.py --only simulation    # or --only supernodes

All processes run on the local machine. They use `--insecure`, which is plain HTTP that any node
may join, and is safe on loopback only. docs/federation.md describes other networks.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import torch

import fedprompt as fp

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE), str(HERE.parent)]

import federation  # noqa: E402
from launch import flower_here  # noqa: E402


def in_process() -> dict[str, dict[int, fp.interfaces.Message]]:
    """Run the federation in one process, without encoding any message."""
    models = [federation.new_model(client) for client in range(len(federation.NAMES))]
    server = federation.Server()
    answers, state = server.init()
    for server_round in range(federation.ARGS.rounds):
        payloads = {
            k: federation.client_round(model, k, server_round, answers[k]["teacher"])
            for k, model in enumerate(models)
        }
        answers, state = server.step(payloads, state)
    return {"answers": answers, "payloads": payloads}


def bits(
    run: Mapping[str, Mapping[int, fp.interfaces.Message]],
) -> dict[tuple[str, int, str], list[tuple[torch.dtype, torch.Size, bytes]]]:
    """Return the contents of all tensors of a run, by message, client and entry."""
    return {
        (part, client, name): [
            (tensor.dtype, tensor.shape, tensor.numpy().tobytes()) for tensor in entry
        ]
        for part, messages in run.items()
        for client, message in messages.items()
        for name, entry in message.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=("simulation", "supernodes"))
    parser.add_argument("--logs", type=Path, help="folder of the processes' output")
    arguments = parser.parse_args()
    expected = in_process()
    with tempfile.TemporaryDirectory() as folder:
        for engine in ("simulation", "supernodes"):
            if arguments.only in (None, engine):
                start, out = time.perf_counter(), Path(folder, engine)
                logs = (arguments.logs or Path(folder, "logs")) / engine
                with flower_here(
                    nodes=len(federation.NAMES), simulation=engine == "simulation", logs=logs
                ) as submit:
                    submit(HERE, {"out": str(out)})
                if bits(fp.load_checkpoint(out)) != bits(expected):
                    sys.exit(f"{engine}: the tensors differ from those of the plain loop")
                seconds = time.perf_counter() - start
                print(f"{engine}: bitwise identical to the plain loop, {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()
