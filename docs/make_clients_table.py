"""Measure time and memory of many clients, and write ``results/tables/clients.csv`` and ``.md``.

python docs/make_clients_table.py  # on Linux, a quarter of an hour and 4 GB of disk
python docs/make_clients_table.py --write  # the table again, from the recorded lines
"""

import csv
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace

TABLES = Path(__file__).parent / "results" / "tables"
NUMBERS = {"326 kB": 81_500, "3.3 kB": 815}
ROWS = [  # clients, clients in a round, size of a payload and of a state, where states are
    *[(clients, clients, "326 kB", "none") for clients in (1_000, 10_000, 100_000)],
    *[(clients, 100, "326 kB", "memory") for clients in (1_000, 5_000)],
    *[(clients, 100, "326 kB", "disk") for clients in (1_000, 10_000)],
    (100_000, 100, "3.3 kB", "disk"),  # of 326 kB, they would take 33 GB of disk
]
HEAD = [
    "clients",
    "in a round",
    "size",
    "states",
    "MiB",
    "ms a client",
    "save s",
    "resume s",
]
TITLES = [
    "clients",
    "in a round",
    "payload and state",
    "states",
    "memory above the start, MiB",
    "CPU, ms a client",
    "a checkpoint, s",
    "resume, s",
]


def measured(clients: int, cohort: int, size: str, where: str) -> list[object]:
    """Run rounds in which clients take part once, in a process of its own."""
    import torch

    import fedprompt as fp

    torch.set_num_threads(1)
    values = {"x": torch.zeros(NUMBERS[size])}

    def train(
        data: SimpleNamespace, answer: fp.interfaces.Message, state: dict
    ) -> tuple:
        payload = {"x": fp.Weighted(answer["x"] + data.id, torch.tensor(1.0))}
        return payload, {} if where == "none" else {"own": answer["x"] - data.id}

    def data(client: int, server_round: int) -> SimpleNamespace:
        return SimpleNamespace(id=client, server_round=server_round)

    method = fp.Method(
        train, fp.averaging_server(values), lambda *all: torch.nn.Identity()
    )
    # The first clients have their states already.
    before = clients - 1_000 if size == "3.3 kB" else 0
    cohorts = [range(at, at + cohort) for at in range(before, clients, cohort)]
    states = Before(before, values["x"])
    begin = fp.Round(-1, method.server.state, states, images=dict.fromkeys(states, ""))
    list(fp.run_rounds(method, data, [range(10)]))  # what the first use loads
    with tempfile.TemporaryDirectory() as folder:
        options = {"states": f"{folder}/states"} if where == "disk" else {}
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        start, began = kilobytes("VmRSS"), time.process_time()
        rounds = fp.run_rounds(method, data, cohorts, start=begin, **options)
        if before:
            next(rounds)  # takes the states from before
            began = time.process_time()
        (now,) = deque(rounds, maxlen=1)
        ran = time.process_time() - began
        peak, times = kilobytes("VmHWM") - start, ["", ""]
        if where == "disk":
            times = []
            for _ in range(2):  # the second one links few files, as after each round
                began = time.process_time()
                fp.save_checkpoint(now, f"{folder}/checkpoint")
                saved = time.process_time() - began
            began = time.process_time()
            loaded = fp.load_checkpoint(f"{folder}/checkpoint")
            again = fp.run_rounds(
                method,
                data,
                [*cohorts, range(10)],
                start=loaded,
                states=f"{folder}/again",
            )
            assert len(next(again).clients) == clients
            times = [f"{saved:.2f}", f"{time.process_time() - began:.1f}"]
    return [
        clients,
        cohort,
        size,
        where,
        round(peak / 1024),
        f"{1000 * ran / clients:.2f}",
        *times,
    ]


class Before(Mapping):
    """States of clients that took part before, each made when it is asked for."""

    def __init__(self, count: int, value: object) -> None:
        self.count, self.value = count, value

    def __getitem__(self, client: str) -> dict:
        return {"own": self.value}

    def __iter__(self) -> Iterator[str]:
        return map(str, range(self.count))

    def __len__(self) -> int:
        return self.count


def kilobytes(key: str) -> int:
    """Read a number of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1])


def write() -> None:
    """Write the table of the recorded lines."""
    rows = list(csv.reader((TABLES / "clients.csv").open()))[1:]
    lines = [TITLES, ["---:", "---:", "---:", "---", *["---:"] * 4], *rows]
    for row in rows:
        row[:2] = (f"{int(number):,}" for number in row[:2])
    text = "\n".join("| " + " | ".join(row) + " |" for row in lines)
    (TABLES / "clients.md").write_text(f"{text}\n")


def main() -> None:
    """Measure each row in a process of its own, and write what was found."""
    if sys.argv[1:2] == ["--row"]:
        clients, cohort, size, where = ROWS[int(sys.argv[2])]
        csv.writer(sys.stdout).writerow(measured(clients, cohort, size, where))
        return
    if sys.argv[1:] != ["--write"]:
        lines = [",".join(HEAD)]
        for place in range(len(ROWS)):
            command = [sys.executable, __file__, "--row", str(place)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            lines.append(done.stdout.strip())
            print(lines[-1], flush=True)
        (TABLES / "clients.csv").write_text("\n".join(lines) + "\n")
    write()


if __name__ == "__main__":
    main()
