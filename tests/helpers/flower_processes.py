"""Flower's simulation, or a SuperLink with SuperNodes, as processes on this machine."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from zipfile import ZipFile

import torch

ROOT = Path(__file__).parents[2]
LARGE = ("torch", "timm", "open-clip-torch", "pot")
LIMIT = 1800.0
"""Seconds for a run, whose dozen processes import PyTorch each: a busy machine took over 600."""
QUIET = {  # no telemetry and no downloads
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "OMP_NUM_THREADS": "1",
}


@contextmanager
def running_flower(
    logs: Path, *, nodes: int, simulation: bool
) -> Iterator[Callable[[Path, str], str]]:
    """Start Flower, yield a function that runs an app and returns its log, and stop Flower."""
    port, home = free_port(), logs / "home"
    home.mkdir()
    link = f'address = "127.0.0.1:{port}"\ninsecure = true\n'
    (home / "config.toml").write_text(f'[superlink]\ndefault = "here"\n\n[superlink.here]\n{link}')
    # Flower's processes start each other by name.
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    environment = {**os.environ, **QUIET, "FLWR_HOME": str(home), "PATH": path}
    with ExitStack() as stack:

        def start(name: str, *command: str) -> subprocess.Popen[bytes]:
            with (logs / f"{name}.log").open("wb") as file:
                process = subprocess.Popen(command, env=environment, stdout=file, stderr=file)
            stack.callback(stop, process)
            return process

        def run(app: Path, config: str) -> str:
            size = ["--federation-config", f"num-supernodes={nodes}"] if simulation else []
            command = ["flwr", "run", str(app), "here", "--stream", "--run-config", config, *size]
            start("run", *command).wait(LIMIT)
            return (logs / "run.log").read_text()

        kind = ["--simulation"] if simulation else []
        where = ["--insecure", "--host", "127.0.0.1", "--port", str(port)]
        wait_for(start("superlink", "flower-superlink", *where, *kind), port)
        for client in range(0 if simulation else nodes):
            where = ["--superlink", f"127.0.0.1:{port}", "--port", str(free_port())]
            config = f"partition-id={client} num-partitions={nodes}"
            command = ["flower-supernode", "--insecure", *where, "--node-config", config]
            start(f"supernode-{client}", *command)
        yield run


def flwr_lines(page: str) -> list[str]:
    """Return the commands of a page that run the app."""
    lines = (ROOT / page).read_text().replace("\\\n", " ").splitlines()
    return [line for line in lines if line.startswith("flwr run examples/flower_app --stream")]


def stand_in(folder: Path) -> Path:
    """Write an index with a package of our name, and return the file that it writes if it runs."""
    ran = folder / "ran"
    info = "fedprompt-9.9.9.dist-info"
    folder.mkdir()
    with ZipFile(folder / "fedprompt-9.9.9-py3-none-any.whl", "w") as wheel:
        wheel.writestr("fedprompt/__init__.py", f"open({str(ran)!r}, 'w').close()")
        extra = "Provides-Extra: flower-sim\nProvides-Extra: flower\n"
        wheel.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: fedprompt\nVersion: 9.9.9\n{extra}"
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return ran


def fresh_environment(folder: Path, source: str) -> Path:
    """Install a clone or a wheel with Flower, and return the folder of programs.

    Large packages are those of this environment.
    """
    uv = [sys.executable, "-m", "uv"]
    subprocess.run([*uv, "venv", "-q", "-p", sys.executable, folder], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "zz_large.pth").write_text(str(Path(torch.__file__).parents[1]))
    here = folder / "here.txt"
    here.write_text("".join(f"{n}; sys_platform == 'none'\n" for n in LARGE))
    what = ["-e", f"{ROOT}[flower-sim]"]
    if source == "wheel":
        subprocess.run([*uv, "build", "-q", "--wheel", "-o", folder, ROOT], check=True)
        what = [f"{next(folder.glob('*.whl'))}[flower-sim]"]
    install = [*uv, "pip", "install", "-q", "-p", folder / "bin" / "python", "--overrides", here]
    subprocess.run([*install, *what], check=True)
    return folder / "bin"


def as_a_user(line: str, programs: Path, home: Path, index: Path) -> str:
    """Run a line of a page in the repository with Flower's defaults, and return its output."""
    ours = {k: v for k, v in os.environ.items() if not k.startswith(("FLWR", "UV_", "PYTHON"))}
    path = os.pathsep.join([str(programs), os.environ["PATH"]])
    user = {**ours, "HOME": str(home), "PATH": path, "UV_FIND_LINKS": str(index)}
    try:
        done = subprocess.run(line, shell=True, cwd=ROOT, env=user, capture_output=True, text=True)
    finally:
        stop_started_in(home)
        for folder in ROOT.glob("fedprompt-[0-9]*"):  # the last and the best round
            shutil.rmtree(folder)
    return done.stdout + done.stderr


def stop_started_in(home: Path) -> None:
    """End the SuperLink that ``flwr run`` left behind, which has its folder in its arguments."""
    table = subprocess.run(["ps", "-A", "-ww", "-o", "pid=,args="], capture_output=True, text=True)
    for pid, arguments in (row.split(maxsplit=1) for row in table.stdout.splitlines()):
        if "flower-superlink" in arguments and str(home) in arguments:
            for member in family_of(int(pid)):
                os.kill(member, signal.SIGKILL)


def free_port() -> int:
    """Find a free port on loopback."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(link: subprocess.Popen[bytes], port: int, seconds: float = 120.0) -> None:
    """Wait until the SuperLink answers."""
    deadline = time.monotonic() + seconds
    while link.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1.0):
                return
        except OSError:  # refused, reset, timed out, or an HTTP error
            time.sleep(0.2)
    raise RuntimeError("the SuperLink does not answer")


def family_of(pid: int) -> list[int]:
    """Return a process and its descendants, which have process groups of their own."""
    family = [pid]
    table = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True)
    parents = {int(pid): int(parent) for pid, parent in map(str.split, table.stdout.splitlines())}
    for ancestor in family:  # the list grows during the loop
        family += [pid for pid, parent in parents.items() if parent == ancestor]
    return family


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a process and its descendants."""
    family = family_of(process.pid)
    for means in (signal.SIGTERM, signal.SIGKILL):
        for pid in family:
            try:
                os.kill(pid, means)
            except ProcessLookupError:
                continue  # it has ended
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            continue
