"""Measurements for the benchmarks: CPU time and peak memory, in one process and one thread."""

import platform
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from memory import peak_bytes


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--check", action="store_true", help="run real sizes, and assert the ratios")


def pytest_configure(config: pytest.Config) -> None:
    """Select the benchmarks by default in this folder.

    Then `python -m pytest tests/benchmarks` needs no `-m "benchmark and not gpu"`.
    """
    here = Path(__file__).parent
    asked = any(argument.startswith("-m") for argument in config.invocation_params.args)
    if not asked and all(
        here in (path := Path(argument.split("::")[0]).resolve()).parents or path == here
        for argument in config.args
    ):
        config.option.markexpr = "benchmark and not gpu"


def _processor() -> str:
    """Return the model and the instruction set of the processor, and the number of threads."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    model = names[0] if names else platform.processor()
    return f"{model}, {torch.backends.cpu.get_cpu_capability()}, 1 thread"


PROCESSOR = _processor()
ROW = re.compile(r"(\w+) / (\w+), (time|memory)(?: (<=|>=) ([\d.]+))?")


class Meter:
    """Meter that compares functions, and asserts ratios only with ``--check``."""

    def __init__(self, *, check: bool, capsys: pytest.CaptureFixture[str]) -> None:
        self.check, self.capsys = check, capsys
        self.rounds = 11 if check else 1
        self.models = ("vit_tiny", "vit_small") if check else ("vit_tiny",)

    def size(self, full: int, *, brief: int = 2) -> int:
        """Return a batch size, a depth or a number of classes: `full` with ``--check``.

        Otherwise `brief`, which is enough to run the same code.
        """
        return full if self.check else brief

    def seconds(
        self, *, settled: bool = False, rounds: int | None = None, **functions: Callable[[], object]
    ) -> dict[str, Tensor]:
        """Return the CPU seconds (rounds,) of each function.

        Rounds are interleaved, so that a busy machine slows all functions of a round equally.

        Args:
            settled: Whether to call each function once more before it is timed. Then no function
                pays for memory that another function has just released.
            rounds: Number of rounds with ``--check``, for functions of many seconds. They are not
                warmed up.
            functions: Functions without arguments.
        """
        if self.check and rounds is None:  # the first calls warm up
            for function in functions.values():
                function()
        times: dict[str, list[float]] = {name: [] for name in functions}
        for _ in range(rounds if rounds and self.check else self.rounds):
            for name, function in functions.items():
                if settled:
                    function()
                start = time.process_time()
                function()
                times[name].append(time.process_time() - start)
        return {name: torch.tensor(values, dtype=torch.float64) for name, values in times.items()}

    def microseconds(self, function: Callable[[], object], *, repeats: int = 20) -> Tensor:
        """Return the GPU time (rounds,) of one call, measured by CUDA events.

        Calls are queued, so that the time to launch them is not counted.
        """
        function()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        times = []
        for _ in range(self.rounds):
            start.record()
            for _ in range(repeats):
                function()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1000 / repeats)
        return torch.tensor(times, dtype=torch.float64)

    def peak_bytes(self, **functions: Callable[[], object]) -> dict[str, int]:
        """Return the largest sum of live allocations above each function's start."""
        return {name: peak_bytes(function) for name, function in functions.items()}

    def compare(
        self,
        title: str,
        table: str,
        *,
        rounds: int | None = None,
        **functions: Callable[[], object],
    ) -> dict[str, Any]:
        """Report ratios of functions, and return the seconds and the peaks in bytes.

        Args:
            title: Beginning of each line.
            table: One ratio a line, with a bound or without: ``ours / theirs, memory <= 1.1``.
            rounds: As for :meth:`seconds`.
            functions: Functions without arguments.
        """
        rows = [ROW.fullmatch(line.strip()).groups() for line in table.strip().splitlines()]
        found: dict[str, Any] = {"time": {}, "memory": {}}
        if timed := {
            name for one, other, kind, *_ in rows if kind == "time" for name in (one, other)
        }:
            chosen = {name: call for name, call in functions.items() if name in timed}
            found["time"] = self.seconds(rounds=rounds, **chosen)
        if any(kind == "memory" for _, _, kind, *_ in rows):
            found["memory"] = self.peak_bytes(**functions)
        for one, other, kind, sign, bound in rows:
            name = f"{title}, {one} / {other}, {kind}"
            if kind == "memory":
                name += f" ({found[kind][one] / 2**20:.0f} / {found[kind][other] / 2**20:.0f} MiB)"
            limit = {{"<=": "at_most", ">=": "at_least"}[sign]: float(bound)} if sign else {}
            self.report(name, found[kind][one] / found[kind][other], **limit)
        return found

    def report(
        self,
        title: str,
        ratios: Tensor | float,
        *,
        at_most: float | None = None,
        at_least: float | None = None,
    ) -> None:
        """Print the median ratio, even if the test passes; ``--check`` asserts its bound."""
        ratio = torch.as_tensor(ratios).median().item()
        bound = next(
            (
                f" (goal {sign} {limit})"
                for sign, limit in (("<=", at_most), (">=", at_least))
                if self.check and limit is not None
            ),
            "",
        )
        with self.capsys.disabled():
            print(f"\n  {title}: {ratio:.2f}{bound} [{PROCESSOR}]", end="")
        if self.check:
            assert at_most is None or ratio <= at_most, f"{title}: {ratio:.3f} > {at_most}"
            assert at_least is None or ratio >= at_least, f"{title}: {ratio:.3f} < {at_least}"


@pytest.fixture
def meter(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> Meter:
    """Compare functions on one thread."""
    torch.set_num_threads(1)
    return Meter(check=request.config.getoption("--check", default=False), capsys=capsys)
