"""Run each command of the standard input in a new folder, and print the output of one that fails.

A command is a script with its arguments. It runs in a copy of this process, which has already
imported what takes seconds.
"""

import importlib
import os
import runpy
import shlex
import sys
import tempfile
import traceback
from collections.abc import Iterable

SHARED = ("fedprompt", "matplotlib.pyplot", "open_clip", "ot", "scipy.stats", "sklearn", "timm")


def run(script: str, *flags: str) -> int:
    """Run a script as a program, and return its exit status."""
    sys.argv, sys.path[0] = [script, *flags], os.path.dirname(script)
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code)
        return end.code if isinstance(end.code, int) else bool(end.code)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def any_failed(commands: Iterable[str]) -> bool:
    """Run commands one after the other, and return whether one failed."""
    failed = False
    for command in map(shlex.split, commands):
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as said:
            child = os.fork()
            if not child:
                os.dup2(said.fileno(), 1)
                os.dup2(said.fileno(), 2)
                script = os.path.abspath(command[0])
                os.chdir(folder)
                status = run(script, *command[1:])
                sys.stdout.flush()
                os._exit(status)  # an orderly exit takes seconds, to free all packages
            if os.waitpid(child, 0)[1]:
                failed = True
                said.seek(0)
                print(f"{shlex.join(command)} failed:\n{said.read()}", flush=True)
    return failed


if __name__ == "__main__":
    for name in SHARED:
        importlib.import_module(name)
    sys.exit(any_failed(sys.stdin))
