"""Trees between the processes of a torch.distributed group, without a server."""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable
from traceback import format_exception_only
from typing import Any, NamedTuple

import torch
import torch.distributed as distributed
from torch import Tensor

import fedprompt._refusals as check
from fedprompt._trees import from_blob, to_blob

_LONGEST_ERROR = 2000
"""Longest text of an error that is sent to other ranks, in characters."""


def gather_trees(
    tree: Any,
    *,
    server_round: int,
    error: Exception | None = None,
    group: "distributed.ProcessGroup | None" = None,
) -> list[Any]:
    """Send a tree from each rank of one owner to all ranks.

    Every rank calls this function at the same point of its loop. The trees are sent as safetensors
    that describe themselves, so no rank states what it expects. Nothing is unpickled. For senders
    that you do not trust, use :func:`decode_payload`.

    Args:
        tree: Tree as of :func:`save_checkpoint`.
        server_round: Round (0-based); it must be the same on all ranks.
        error: Error of this rank. With an error, `tree` is not sent.
        group: Process group of a backend that supports CPU tensors, such as gloo. If None, the
            default group.

    Returns:
        The trees of all ranks in the order of ranks, with tensors on the kinds of devices that they
        came from. All ranks receive bitwise identical trees, the sender's copy included.

    Raises:
        Exception: `error`, if it is given.
        ValueError: If this process is not in the group, the ranks are in different rounds, or a
            tree arrives damaged.
        RuntimeError: If another rank has an error (the text has that error and its rank), has died
            or does not call within the timeout of the group (the text has the round).

    Example:
        >>> store = torch.distributed.HashStore()
        >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> gather_trees({"seen": [3, 5]}, server_round=0)
        [{'seen': [3, 5]}]
        >>> torch.distributed.destroy_process_group()
    """
    _check_group(group)
    check.count("server_round", server_round, at_least=0)
    check.instance("error", error, Exception | None, "be an exception or None")
    return _gathered(tree, error, _Wait(server_round, "a tree", group))


class _Wait(NamedTuple):
    """A result of all ranks that this rank waits for."""

    server_round: int
    what: str
    group: "distributed.ProcessGroup | None"

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Gather tensors; an error of the backend becomes one that names round and result."""
        world, rank = distributed.get_world_size(self.group), distributed.get_rank(self.group)
        gathered = [torch.empty_like(tensor) for _ in range(world)]
        try:
            distributed.all_gather(gathered, tensor, group=self.group)
        except RuntimeError as error:
            others = [other for other in range(world) if other != rank]
            who = f"rank {others[0]}" if len(others) == 1 else f"one of the ranks {others[:8]}"
            raise RuntimeError(
                f"round {self.server_round}: rank {rank} waited for {self.what}, and {who} did not "
                "answer. It has died, has left its loop, or is slower than the timeout of the "
                f"group (init_process_group). The backend says: {str(error)[:_LONGEST_ERROR]}"
            ) from error
        return gathered


def _gathered(tree: Any, error: Exception | None, wait: _Wait) -> list[Any]:
    blob = b""
    try:
        blob = to_blob(tree, "tree") if error is None else blob
    except Exception as refused:  # raised below, because the other ranks wait
        error = refused
    if error is not None:
        text = "".join(format_exception_only(error)).strip()  # at its end, a note says where
        short = len(text) <= _LONGEST_ERROR
        blob = (text if short else f"{text[:1500]} ... {text[-400:]}").encode(errors="replace")
    head = [error is not None, len(blob), wait.server_round, *hashlib.sha256(blob).digest()]
    row = torch.tensor(head, dtype=torch.int64, device="cpu")
    rows = [gathered.tolist() for gathered in wait.all_gather(row)]
    failed, lengths, rounds, *_ = zip(*rows, strict=True)
    blobs = _gather_blobs(blob, list(lengths), wait)
    if error is not None:
        raise error
    texts = [f"rank {rank}: {blobs[rank].decode()}" for rank, wrong in enumerate(failed) if wrong]
    if texts:
        raise RuntimeError("; ".join(texts))
    check.require(len(set(rounds)) <= 1, "server_round", "be the same on every rank", list(rounds))
    for rank, (received, (_, _, _, *digest)) in enumerate(zip(blobs, rows, strict=True)):
        if hashlib.sha256(received).digest() != bytes(digest):
            raise check.wrong("tree", f"arrive as rank {rank} sent it", "other bytes")
    return [from_blob(received) for received in blobs]


def on_all_ranks(
    work: Callable[[], Any],
    server_round: int,
    *,
    group: "distributed.ProcessGroup | None",
    what: str = "its results",
) -> list[Any]:
    """Return the results of all ranks; an error of one rank ends the call on all of them."""
    if group is None:
        return [work()]
    _check_group(group)
    tree = None
    error = None
    try:
        tree = work()
    except Exception as raised:  # raised by `_gathered`, because the other ranks wait
        error = raised
    return _gathered(tree, error, _Wait(server_round, what, group))


def rank_of(group: "distributed.ProcessGroup | None") -> tuple[int, int]:
    """Return the rank of this process and the number of ranks."""
    if group is None:
        return 0, 1
    return distributed.get_rank(group), distributed.get_world_size(group)


def is_here(client: int, group: "distributed.ProcessGroup | None") -> bool:
    """Return whether this rank is the home of a client."""
    rank, world = rank_of(group)
    return ranks_of([client], world)[client] == rank


def ranks_of(clients: Iterable[int], world: int, *, share: bool = False) -> dict[int, int]:
    """Divide clients over ranks: the home of client c is rank c % world.

    With `share`, each rank takes at most ``ceil(clients / world)`` clients, those of lower ids
    first. Each of the others, in the order of ids, is a guest of the first rank with the fewest.
    """
    ids, hosts, load = sorted(clients), dict[int, int](), Counter[int]()
    most = -(-len(ids) // world) if share else len(ids)
    for client in ids:
        if load[client % world] < most:
            hosts[client] = client % world
            load[client % world] += 1
    for client in ids:
        if client not in hosts:
            hosts[client] = min(range(world), key=lambda rank: load[rank])
            load[hosts[client]] += 1
    return hosts


def _check_group(group: "distributed.ProcessGroup | None") -> None:
    rule = "be a process group of torch.distributed"
    fits = distributed.is_available() and distributed.is_initialized()
    check.require(fits, "group", rule, "none (call init_process_group first)")
    outside: object = distributed.GroupMember.NON_GROUP_MEMBER
    if group is not outside:
        rule = "be a process group or None"
        check.instance("group", group, distributed.ProcessGroup | None, rule)
    if distributed.get_rank(group) < 0:
        raise check.wrong("group", "contain this process", "a group without it")


def _gather_blobs(blob: bytes, lengths: list[int], wait: _Wait) -> list[bytes]:
    padded = torch.frombuffer(bytearray(blob.ljust(max(lengths), b"\0")), dtype=torch.uint8)
    gathered = zip(wait.all_gather(padded), lengths, strict=True)
    return [received[:length].numpy().tobytes() for received, length in gathered]
