"""Jobs of the study, each with a line in a JSON-lines file, and two processes that run them."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from multiprocessing import Queue, get_context
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import torch

from studies import records
from studies.gallery import evaluate, registry, tasks
from studies.gallery.registry import Method
from studies.gallery.tasks import Settings

NUM_TRIALS = 6
TUNING_SEED = 1_000  # of no reported run
TUNED_ON = "dirichlet"
NAMED = ("method", "task", "partition", "seed", "trial")


@dataclass(frozen=True)
class Job:
    """One run of a method.

    Attributes:
        method: Name of the method.
        path: File of the method.
        task: Name of the task.
        partition: Name of the partition.
        seed: Seed of the run.
        trial: Number of the tuning trial, or None if the run is reported.
        values: Hyperparameters.
        settings: Budget.
    """

    method: str
    path: str
    task: str
    partition: str
    seed: int
    trial: int | None
    values: dict[str, Any]
    settings: Settings

    def key(self) -> tuple[Any, ...]:
        """Return what tells this job from the others of the file."""
        return key(vars(self))

    def measure(self, method: Method, finished_round: Callable[[], None]) -> dict[str, Any]:
        """Run the method on the task, and return its figures: numbers, or lists of them."""
        trial = tasks.make_trial(
            self.task,
            self.partition,
            seed=self.seed,
            settings=self.settings,
            validate=self.trial is not None,
            inputs=method.inputs,
        )
        return evaluate.run(method.function, trial, self.values, finished_round=finished_round)


def trials(method: Method, task: str) -> list[dict[str, Any]]:
    """Return the hyperparameters of the tuning trials of a method.

    The first trial has the default values. The others are drawn from the ranges in the method's
    file, log-uniformly or among choices.
    """
    rng = np.random.default_rng([TUNING_SEED, *f"{task} {method.name}".encode()])
    drawn = [dict(method.defaults)]
    while method.search and len(drawn) < NUM_TRIALS:
        values = {name: _draw(each, rng) for name, each in method.search.items()}
        drawn.append(method.defaults | values)
    return drawn


def _draw(values: registry.Range, rng: np.random.Generator) -> Any:
    if isinstance(values, list):
        return values[rng.integers(len(values))]
    low, high = values
    return float(f"{np.exp(rng.uniform(np.log(low), np.log(high))):.3g}")


def load(path: Path) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Read the records of a file by the key of their jobs."""
    return {key(record): record for record in records.read(path)}


def key(record: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the fields that a job and its record have in common."""
    values = json.dumps(record["values"], sort_keys=True)
    return *(record[name] for name in NAMED), values


def append(path: Path, job: Job, figures: dict[str, Any]) -> dict[str, Any]:
    """Write the record of a job as one line, which is on the disk before this returns."""
    named = {name: getattr(job, name) for name in (*NAMED, "values")}
    record = named | records.origin() | records.rounded(figures)
    records.append(path, record)
    return record


def run(job: Job, finished_round: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Run a job in this process."""
    torch.set_num_threads(1)
    method = registry.in_file(Path(job.path))[job.method]
    return job.measure(method, finished_round)


def run_all(
    jobs: Sequence[Job],
    path: Path,
    *,
    workers: int,
    finished_round: Callable[[], None] = lambda: None,
    finished_job: Callable[[], None] = lambda: None,
) -> list[dict[str, Any]]:
    """Run jobs that have no record yet, and return the records of all, in the order of jobs.

    Args:
        jobs: Jobs.
        path: JSON-lines file.
        workers: Number of processes; with 1, jobs run in this process.
        finished_round: Called after each round of a job, and for each round that is not run again.
        finished_job: Called after each job, and for each job that is not run again.

    Raises:
        RuntimeError: If a job fails. The records of the others are written before.
    """
    known = load(path)
    missing = [job for job in jobs if job.key() not in known]
    for job in jobs:
        if job.key() in known:
            finished_job()
            for _ in range(job.settings.rounds):
                finished_round()
    failed = []
    for job, result in _results(missing, workers, finished_round):
        if isinstance(result, Exception):
            failed.append((job, result))
        else:
            known[job.key()] = append(path, job, result)
            finished_job()
    if failed:
        job, error = failed[0]
        raise RuntimeError(f"{len(failed)} jobs failed, the first is {job}") from error
    return [known[job.key()] for job in jobs]


def _results(
    jobs: Sequence[Job], workers: int, finished_round: Callable[[], None]
) -> Iterable[tuple[Job, dict[str, Any] | Exception]]:
    if workers == 1:
        for job in jobs:
            yield job, _outcome(partial(run, job, finished_round))
        return
    context = get_context("spawn")
    queue = context.Queue()
    listener = Thread(target=_listen, args=(queue, finished_round), daemon=True)
    listener.start()
    with ProcessPoolExecutor(workers, context, _begin_worker, (queue,)) as pool:
        futures = {pool.submit(_work, job): job for job in jobs}
        for future in as_completed(futures):
            yield futures[future], _outcome(future.result)
    queue.put(None)
    listener.join()


def _outcome(result: Callable[[], dict[str, Any]]) -> dict[str, Any] | Exception:
    try:
        return result()
    except Exception as error:  # the other jobs run before it is raised
        return error


_queue: "Queue[bool | None]"


def _begin_worker(queue: "Queue[bool | None]") -> None:
    global _queue
    _queue = queue


def _work(job: Job) -> dict[str, Any]:
    return run(job, lambda: _queue.put(True))


def _listen(queue: "Queue[bool | None]", finished_round: Callable[[], None]) -> None:
    while queue.get() is not None:
        finished_round()
