"""Run examples in separate processes that can be killed.

A server imports all examples once and forks a process for each run. The kernel kills a run with
SIGKILL, so that it cannot catch the signal or clean up. It is killed at a given moment, or when it
renames a file, which is in the middle of a save. Moments are measured on the CPU clock of the
run, which does not advance while the run waits on a busy machine.
"""

import importlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

EXAMPLES = ("fedhpl", "fedl2g", "fedotp", "sgpt")


class Server:
    """Server that runs each example in a forked process and a separate folder.

    The example writes `memory`, `out` and `printed` to its folder.
    """

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process

    def run(self, example: str, folder: Path, *flags: str, **fate: Any) -> tuple[int, float]:
        """Run an example to its end.

        Args:
            example: Name of the example.
            folder: Folder in which it runs, created if missing.
            *flags: Flags in addition to ``--quick``, ``--out`` and ``--checkpoint``.
            **fate: With `moment`, the run is killed after this number of CPU seconds. With
                `renames`, it is killed when it has renamed this number of files. With `forget`,
                which is a row and a list of names, the checkpoint of this row loses these names.

        Returns:
            The exit code of the run, which is -9 if it was killed, and its CPU seconds.
        """
        arguments = [f"{example}.py", "--quick", "--out", "out", "--checkpoint", "memory", *flags]
        print(
            json.dumps({"example": example, "folder": str(folder), "arguments": arguments, **fate}),
            file=self.process.stdin,
            flush=True,
        )
        status, seconds = json.loads(self.process.stdout.readline())
        return status, seconds


@contextmanager
def server() -> Iterator[Server]:
    """Start a server and end it on exit."""
    here = Path(__file__).resolve().parent
    root = here.parents[1]
    paths = [str(path) for path in (root, root / "examples", here.parent, here)]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "MPLBACKEND": "Agg",
        "PYTHONPATH": os.pathsep.join(paths),
    }
    command = [sys.executable, "-m", "runs"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        yield Server(process)


def _serve() -> None:
    modules = {example: importlib.import_module(f"studies.{example}") for example in EXAMPLES}
    for line in sys.stdin:
        order = json.loads(line)
        child = os.fork()
        if child == 0:
            _live(modules[order["example"]], order)
        status, usage = _wait(child, order.get("moment"))
        print(
            json.dumps([os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime]),
            flush=True,
        )


def _wait(child: int, moment: float | None) -> tuple[int, resource.struct_rusage]:
    clock = ~child << 3 | 2  # the CPU clock of a process, as by clock_getcpuclockid(3)
    while moment is not None:
        ended, *result = os.wait4(child, os.WNOHANG)
        if ended:
            return tuple(result)
        if time.clock_gettime(clock) >= moment:
            # The child may have ended, but its id stays valid until it is waited for.
            os.kill(child, signal.SIGKILL)
            break
        time.sleep(0.001)
    return os.wait4(child, 0)[1:]


def _live(module: Any, order: dict[str, Any]) -> None:
    """Run an example in the forked process and exit."""
    code = 1
    try:
        os.makedirs(order["folder"], exist_ok=True)
        os.chdir(order["folder"])
        for stream, name in ((1, "printed"), (2, "complaints")):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
        if "renames" in order:
            _die_renaming(order["renames"])
        if "forget" in order:
            _forget(*order["forget"])
        sys.argv = order["arguments"]
        module.main()
        sys.stdout.flush()
        code = 0
    except Exception as error:
        print(repr(error), file=sys.stderr, flush=True)
    finally:
        os._exit(code)


def _die_renaming(last: int) -> None:
    replace, calls = os.replace, 0

    def fatal(*paths: object) -> None:
        nonlocal calls
        replace(*paths)
        calls += 1
        if calls == last:
            os.kill(os.getpid(), signal.SIGKILL)

    os.replace = fatal


def _forget(row: str, things: list[str]) -> None:
    """Break checkpoints on purpose: the given names are missing when the row is loaded."""
    import fedprompt

    load = fedprompt.load_checkpoint

    def forgetful(directory: Path, **options: object) -> Any:
        saved = load(directory, **options)
        if Path(directory).name == row:
            saved["memory"] = {
                name: state for name, state in saved["memory"].items() if name not in things
            }
        return saved

    fedprompt.load_checkpoint = forgetful


if __name__ == "__main__":
    _serve()
