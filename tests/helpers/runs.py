"""Examples that run in processes of their own and die there: a server that has imported everything forks one for each run.

A run is killed by the kernel, with nothing to catch and nothing to clean up: at a moment, or by a call to rename a file, which is where
a save is half done. Moments are counted on the run's own processor clock, which stands still while a busy machine lets it wait.
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
    """Runs examples in forked processes, in a folder each, where they write `memory`, `out` and `printed`."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process

    def run(self, example: str, folder: Path, *flags: str, **fate: Any) -> tuple[int, float]:
        """Start an example and wait for its end; return how it ended, -9 if it was killed, and its processor's seconds.

        Args:
            example: Its name.
            folder: Where it runs; made if need be.
            *flags: Beside ``--quick``, ``--out`` and ``--checkpoint``.
            **fate: `moment`: killed after so many seconds; `renames`: or with its n-th renaming of a file; `forget`: a row and things
                that its loop does not remember.
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
    """Start a server, and end it."""
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
    clock = (
        ~child << 3 | 2
    )  # the processor clock of another process, as clock_getcpuclockid(3) makes it
    while moment is not None:
        ended, *result = os.wait4(child, os.WNOHANG)
        if ended:
            return tuple(result)
        if time.clock_gettime(clock) >= moment:
            os.kill(
                child, signal.SIGKILL
            )  # it may have just ended, but nobody has waited for it yet: the id is still its own
            break
        time.sleep(0.001)
    return os.wait4(child, 0)[1:]


def _live(module: Any, order: dict[str, Any]) -> None:
    """Be the run, to the end; never return."""
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
    """Known to be wrong: load the row's checkpoint without some of the things that its loop remembers."""
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
