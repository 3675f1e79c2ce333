"""Messages between the processes of a torch.distributed group, without a server."""

import hashlib
from collections.abc import Sequence
from traceback import format_exception_only
from typing import Any

import torch
import torch.distributed as distributed
from torch import Tensor

from fedprompt._checks import check_count, check_kind, kind, wrong_type, wrong_value
from fedprompt._trees import from_blob, to_blob
from fedprompt.interfaces import Message, Weighted
from fedprompt.wire.decode import decode_payload
from fedprompt.wire.encode import encode_payload
from fedprompt.wire.format import Expected, Header, check_header


def gather_messages(
    message: Message | None,
    *,
    expect: Sequence[Expected | None],
    max_bytes: int,
    header: Header,
    group: "distributed.ProcessGroup | None" = None,
) -> list[dict[str, Tensor | Weighted] | None]:
    """Send a message from each rank of a process group to all ranks.

    Every rank calls this function at the same point of its loop. A rank without a message passes
    None. Messages are sent as blobs of :func:`encode_payload`, so those of different ranks may
    differ in names, shapes and dtypes, and nothing is unpickled. All ranks receive bitwise
    identical messages, so each of them can compute the server's step.

    Either every rank returns, or every rank raises an error. One case is beyond this rule: if a
    process has died or never calls, the others raise torch's ``RuntimeError``, at the latest after
    the timeout of the group.

    All processes must be trusted to run this function. If a process sends more bytes than it
    announced, gloo itself ends the receiving process (SIGABRT), which Python cannot catch.

    Args:
        message: Tensors or :class:`Weighted` by name. If None, nothing is sent.
        expect: Requirements for the message of each rank, as for :func:`decode_payload`. None for
            the ranks that must send nothing.
        max_bytes: Maximum size in bytes of one message; the smallest value of any rank holds for
            all. Each rank allocates two blobs of the longest length for each rank.
        header: Header of `message`. Its fingerprint is compared with the one in `expect`, and its
            `server_round` must be the same on all ranks.
        group: Process group of a backend that supports CPU tensors, such as gloo. If None, the
            default group.

    Returns:
        The messages of all ranks in the order of ranks, as :func:`decode_payload` reads them. None
        for the ranks that sent nothing.

    Raises:
        ValueError: If this process is not in the group; a message cannot be sent or is not as
            expected (the text names its rank); the ranks are in different rounds; a blob is longer
            than `max_bytes`; or another rank raised an error.
        RuntimeError: If a rank has died or does not call (from torch).

    Example:
        A group of one process. Under ``torchrun --nproc-per-node=2`` there are two, and
        ``init_process_group("gloo")`` is enough.

        >>> store = torch.distributed.HashStore()
        >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> payload = collect(nn.Linear(2, 1, bias=False), weight=30)
        >>> messages = gather_messages(
        ...     payload, expect=[Expected(payload)], max_bytes=10_000, header=Header()
        ... )
        >>> messages[0]["weight"].weight
        tensor(30.)
        >>> torch.distributed.destroy_process_group()
    """
    ranks = _num_ranks(group)
    blob, claim = b"", [0, 0, 0]
    error: Exception | None = None
    try:
        _check_expect(expect, ranks)
        check_count("max_bytes", max_bytes)
        check_header(header)
        blob = b"" if message is None else encode_payload(message, header=header)
        claim = [len(blob), min(int(max_bytes), 2**62), int(header.server_round)]
    except Exception as refused:  # raised in `_agree`, because the other ranks wait there
        error = refused
    claims = _agree(error, claim, group)
    _check_claims(claims)
    blobs = _gather_blobs(blob, [length for length, _, _ in claims], group)
    try:
        messages = [
            _read(rank, *sent, max_bytes=max_bytes)
            for rank, sent in enumerate(zip(blobs, expect, strict=True))
        ]
    except Exception as refused:  # any error of one rank must end the call on all ranks
        error = refused
    _agree(error, [], group)
    return messages


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
    that you do not trust, use :func:`gather_messages`.

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
            or does not call.

    Example:
        >>> store = torch.distributed.HashStore()
        >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> gather_trees({"seen": [3, 5]}, server_round=0)
        [{'seen': [3, 5]}]
        >>> torch.distributed.destroy_process_group()
    """
    _num_ranks(group)
    check_count("server_round", server_round, at_least=0)
    check_kind("error", error, Exception | None, "be an exception or None")
    blob = b""
    try:
        blob = to_blob(tree, "tree") if error is None else b""
    except Exception as refused:  # raised below, because the other ranks wait
        error = refused
    if error is not None:
        blob = "".join(format_exception_only(error)).strip().encode(errors="replace")
    row = torch.tensor(
        [error is not None, len(blob), server_round, *hashlib.sha256(blob).digest()],
        dtype=torch.int64,
        device="cpu",
    )
    rows = [each.tolist() for each in _all_gather(row, group)]
    failed, lengths, rounds, *_ = zip(*rows, strict=True)
    blobs = _gather_blobs(blob, list(lengths), group)
    if error is not None:
        raise error
    texts = [f"rank {rank}: {blobs[rank].decode()}" for rank, each in enumerate(failed) if each]
    if texts:
        raise RuntimeError("; ".join(texts))
    if len(set(rounds)) > 1:
        raise wrong_value("server_round", "be the same on every rank", list(rounds))
    for rank, (each, (_, _, _, *digest)) in enumerate(zip(blobs, rows, strict=True)):
        if hashlib.sha256(each).digest() != bytes(digest):
            raise wrong_value("tree", f"arrive as rank {rank} sent it", "other bytes")
    return [from_blob(each, to_devices=True) for each in blobs]


def _num_ranks(group: "distributed.ProcessGroup | None") -> int:
    if not (distributed.is_available() and distributed.is_initialized()):
        raise wrong_value(
            "group",
            "be a process group of torch.distributed",
            "none (call init_process_group first)",
        )
    check_kind("group", group, distributed.ProcessGroup | None, "be a process group or None")
    if distributed.get_rank(group) < 0:
        raise wrong_value("group", "contain this process", "a group without it")
    return distributed.get_world_size(group)


def _check_expect(expect: object, ranks: int) -> None:
    if isinstance(expect, Expected) or not isinstance(expect, Sequence):
        raise wrong_type(
            "expect", "be a sequence with an Expected or None for each rank", kind(expect)
        )
    if len(expect) != ranks:
        raise wrong_value("expect", f"have one item for each of {ranks} ranks", len(expect))
    for rank, form in enumerate(expect):
        if not (form is None or isinstance(form, Expected)):
            raise wrong_type(f"expect[{rank}]", "be Expected(message, ...) or None", kind(form))


def _check_claims(claims: list[list[int]]) -> None:
    """Refuse before memory is allocated.

    All ranks see the same numbers, so either all of them refuse or none does.
    """
    lengths, limits, rounds = zip(*claims, strict=True)
    if max(lengths) > min(limits):
        rank = lengths.index(max(lengths))
        raise wrong_value(
            "message",
            f"be a blob of at most {min(limits)} bytes on every rank",
            f"{max(lengths)} on rank {rank}",
        )
    if len(set(rounds)) > 1:
        raise wrong_value("header.server_round", "be the same on every rank", list(rounds))


def _read(
    rank: int, blob: bytes, expect: Expected | None, *, max_bytes: int
) -> dict[str, Tensor | Weighted] | None:
    if not blob:
        return None
    if expect is None:
        raise wrong_value(f"expect[{rank}]", f"be given because rank {rank} sends a message", None)
    try:
        return decode_payload(blob, expect=expect, max_bytes=max_bytes)[0]
    except ValueError as error:
        raise ValueError(f"rank {rank}: {error}") from error


def _agree(
    error: Exception | None, row: list[int], group: "distributed.ProcessGroup | None"
) -> list[list[int]]:
    """Exchange a row of numbers, or raise on every rank if one of them has an error."""
    rows = [
        each.tolist()
        for each in _all_gather(
            torch.tensor([error is not None, *row], dtype=torch.int64, device="cpu"), group
        )
    ]
    if error is not None:
        raise error
    if failed := [rank for rank, (raised, *_) in enumerate(rows) if raised]:
        raise ValueError(
            "`message` must be sent and accepted by every rank; "
            f"the error messages of ranks {failed} give the reason."
        )
    return [numbers for _, *numbers in rows]


def _gather_blobs(
    blob: bytes, lengths: list[int], group: "distributed.ProcessGroup | None"
) -> list[bytes]:
    if not any(lengths):
        return [blob for _ in lengths]
    padded = torch.frombuffer(bytearray(blob.ljust(max(lengths), b"\0")), dtype=torch.uint8)
    return [
        each[:length].numpy().tobytes()
        for each, length in zip(_all_gather(padded, group), lengths, strict=True)
    ]


def _all_gather(tensor: Tensor, group: "distributed.ProcessGroup | None") -> list[Tensor]:
    gathered = [torch.empty_like(tensor) for _ in range(distributed.get_world_size(group))]
    distributed.all_gather(gathered, tensor, group=group)
    return gathered
