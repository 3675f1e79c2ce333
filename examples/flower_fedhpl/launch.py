"""Start Flower on the local machine, run apps, and stop all its processes."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

Submit = Callable[[Path, Mapping[str, str]], None]
EXAMPLES = Path(__file__).resolve().parents[1]
QUIET = {  # no telemetry and no downloads
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "OMP_NUM_THREADS": "1",
}


@contextmanager
def flower_here(
    *, nodes: int, simulation: bool, logs: Path, paths: tuple[Path, ...] = ()
) -> Iterator[Submit]:
    """Start Flower's simulation or a SuperLink with SuperNodes, and stop it on exit.

    The processes communicate over loopback without TLS.

    Args:
        nodes: Number of clients.
        simulation: If true, the simulation is started. Otherwise a SuperLink is started, with one
            SuperNode for each client.
        logs: Folder for the output of the processes and for Flower's own files.
        paths: Folders of an app's modules, in addition to the examples.

    Yields:
        A function that runs an app, given its folder and overrides of its run configuration. The
        app writes its result to ``out`` of this configuration. The function raises a RuntimeError
        if there is no result, because ``flwr run`` succeeds even if the app fails.
    """
    home, port = logs / "flower", free_port()
    home.mkdir(parents=True, exist_ok=True)
    (home / "config.toml").write_text(
        '[superlink]\ndefault = "here"\n\n'
        f'[superlink.here]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
    )
    searched = [*map(str, (EXAMPLES, *paths)), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ,
        **QUIET,
        "FLWR_HOME": str(home),
        "PYTHONPATH": os.pathsep.join(searched),
    }
    # Flower's processes start each other by name.
    environment["PATH"] = os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"]
    with ExitStack() as stack:

        def start(name: str, *command: str) -> subprocess.Popen[bytes]:
            file = stack.enter_context((logs / f"{name}.log").open("wb"))
            process = subprocess.Popen(
                command,
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            stack.callback(stop, process)
            return process

        def submit(app: Path, config: Mapping[str, str], *, timeout: float = 600.0) -> None:
            values = " ".join(f'{key}="{value}"' for key, value in config.items())
            size = f"num-supernodes={nodes} client-resources-num-cpus=1 init-args-num-cpus=2"
            federation = ["--federation-config", size] if simulation else []
            run = start(
                "run",
                "flwr",
                "run",
                str(app),
                "here",
                "--stream",
                "--run-config",
                values,
                *federation,
            )
            run.wait(timeout)
            if not Path(config["out"]).exists():
                raise RuntimeError(
                    f"no result in {config['out']}; see {logs}\n"
                    f"{(logs / 'run.log').read_text()[-2000:]}"
                )

        kind = ["--simulation"] if simulation else []
        offline = "--disable-runtime-dependency-installation"
        wait_for(
            start(
                "superlink",
                "flower-superlink",
                "--insecure",
                "--host",
                "127.0.0.1",
                "--port",
                str(port),
                offline,
                *kind,
            ),
            port,
        )
        for client in range(0 if simulation else nodes):
            who = f"partition-id={client} num-partitions={nodes}"
            where = ["--superlink", f"127.0.0.1:{port}", "--port", str(free_port())]
            start(
                f"supernode-{client}",
                "flower-supernode",
                "--insecure",
                *where,
                "--node-config",
                who,
            )
        yield submit


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


def stop(process: subprocess.Popen[bytes], seconds: float = 20.0) -> None:
    """End a process and all its descendants, by SIGTERM and then by SIGKILL.

    The descendants are found one by one, because they have separate process groups.
    """
    family = [process.pid, *descendants(process.pid)]
    for means in (signal.SIGTERM, signal.SIGKILL):
        for pid in family:
            try:
                os.kill(pid, means)
            except ProcessLookupError:
                continue  # it has ended
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            continue


def descendants(ancestor: int) -> list[int]:
    """Find the children of a process, their children, and so on."""
    table = subprocess.run(
        ["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True
    ).stdout
    parents = {int(pid): int(parent) for pid, parent in map(str.split, table.splitlines())}
    found = [ancestor]
    for pid in found:  # the list grows during the loop
        found += [child for child, parent in parents.items() if parent == pid]
    return found[1:]
