"""All four federations over a SuperLink and three SuperNodes, compared with a plain loop."""

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

from federations import FEDERATIONS, assert_same_bits, in_process  # noqa: E402
from launch import flower_here  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("federations", nargs="*", default=list(FEDERATIONS))
    parser.add_argument("--simulation", action="store_true", help="Flower's simulation instead")
    parser.add_argument("--logs", type=Path, help="folder for what Flower's processes print; kept")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        logs = arguments.logs or Path(folder, "logs")
        with flower_here(
            nodes=3, simulation=arguments.simulation, logs=logs, paths=(TESTS,)
        ) as submit:
            for name in arguments.federations:
                start, out = time.perf_counter(), Path(folder, name)
                submit(HERE / "app", {"federation": name, "out": str(out)})
                expected = in_process(FEDERATIONS[name]())
                assert_same_bits(
                    fp.load_checkpoint(out),
                    {"answers": dict(expected.answers), "state": expected.server},
                )
                print(
                    f"{name}: the same bits as the plain loop, {time.perf_counter() - start:.0f} s",
                    flush=True,
                )


if __name__ == "__main__":
    main()
