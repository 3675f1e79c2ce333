"""Run all four federations over a SuperLink and three SuperNodes, and compare with a plain loop."""

import argparse
import sys
import tempfile
import time
from pathlib import Path

import torch

import fedprompt as fp

HERE = Path(__file__).resolve().parent
TESTS, EXAMPLE = HERE.parent, HERE.parents[1] / "examples" / "flower_fedhpl"
sys.path += [str(TESTS), str(EXAMPLE)]

from federations import FEDERATIONS, assert_bitwise_identical, in_process  # noqa: E402
from launch import flower_here  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("federations", nargs="*", default=list(FEDERATIONS))
    parser.add_argument("--simulation", action="store_true", help="use Flower's simulation")
    parser.add_argument(
        "--logs", type=Path, help="folder for the output of Flower's processes; it is kept"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        logs = arguments.logs or Path(folder, "logs")
        with flower_here(
            nodes=3, simulation=arguments.simulation, logs=logs, paths=(TESTS,)
        ) as submit:
            for name in arguments.federations:
                start = time.perf_counter()
                out = Path(folder, name)
                submit(HERE / "app", {"federation": name, "out": str(out)})
                expected = in_process(FEDERATIONS[name]())
                assert_bitwise_identical(
                    fp.load_checkpoint(out),
                    {"answers": dict(expected.answers), "state": expected.server},
                )
                seconds = time.perf_counter() - start
                print(f"{name}: bitwise identical to the plain loop, {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()
