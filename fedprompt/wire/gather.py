"""Messages between the processes of a torch.distributed group: an engine without a server, and without anything to install."""

from collections.abc import Sequence

import torch
import torch.distributed as distributed
from torch import Tensor

from fedprompt._checks import check_count, kind, wrong_type, wrong_value
from fedprompt.interfaces import Message, Weighted
from fedprompt.wire.encode import decode_payload, encode_payload
from fedprompt.wire.format import Expected, Header, check_header


def gather_messages(
    message: Message | None,
    *,
    expect: Sequence[Expected | None],
    max_bytes: int,
    header: Header,
    group: "distributed.ProcessGroup | None" = None,
) -> list[dict[str, Tensor | Weighted] | None]:
    """Hand every rank of a process group the messages of all ranks.

    Every rank calls this at the same point of its loop, one that takes no part in the round too, with None. Messages travel as blobs of
    :func:`encode_payload`, so those of different ranks may differ in names, shapes and dtypes, and nothing is unpickled. As all ranks get
    the same bits, each can compute the server's step by itself.

    Either every rank returns, or every rank raises: nobody goes on with a round that another rank refused. What cannot be agreed upon is a
    process that is gone or never calls; the others then raise torch's ``RuntimeError``, at the latest after the timeout of the group.

    Args:
        message: Tensors or :class:`Weighted` by name; None sends nothing.
        expect: For each rank what it may send, its form and fingerprint, as for :func:`decode_payload`; None where it must send nothing.
        max_bytes: At most so many bytes for one message; the smallest limit of any rank holds for all. Each rank takes memory for two
            blobs of the length of the longest one per rank.
        header: What travels beside `message`: the fingerprint that others expect, and `server_round`, on which all ranks must agree.
        group: Of any backend that carries CPU tensors, such as gloo; None is the default group.

    Returns:
        The messages in the order of ranks, the own one among them, each as :func:`decode_payload` reads it; None where nothing was sent.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If this process is in no such group, a message cannot be sent or is not what is expected (the text names its
            rank), ranks disagree about the round, a blob is longer than `max_bytes`, or another rank raised.
        RuntimeError: From torch, if a rank is gone or does not call.

    Example:
        A group of one; started by ``torchrun --nproc-per-node=2`` there are two, and ``init_process_group("gloo")`` is enough.

        >>> torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        >>> upload = collect(nn.Linear(2, 1, bias=False), weight=30)
        >>> messages = gather_messages(upload, expect=[Expected(upload)], max_bytes=10_000, header=Header())
        >>> messages[0]["weight"].weight
        tensor(30.)
        >>> torch.distributed.destroy_process_group()
    """
    ranks = _num_ranks(group)
    blob, claim, error = b"", [0, 0, 0], None
    try:
        _check_expect(expect, ranks)
        check_count("max_bytes", max_bytes)
        check_header(header)
        blob = b"" if message is None else encode_payload(message, header=header)
        claim = [len(blob), min(int(max_bytes), 2**62), int(header.server_round)]
    except Exception as refused:
        error = refused
    claims = _agree(error, claim, group)
    _check_claims(claims)
    blobs = _gather_blobs(blob, [length for length, _, _ in claims], group)
    try:
        messages = [
            _read(rank, *sent, max_bytes=max_bytes)
            for rank, sent in enumerate(zip(blobs, expect, strict=True))
        ]
    except Exception as refused:
        error = refused
    _agree(error, [], group)
    return messages


def _num_ranks(group: "distributed.ProcessGroup | None") -> int:
    if not (distributed.is_available() and distributed.is_initialized()):
        raise wrong_value(
            "group",
            "be a process group of torch.distributed",
            "none: call init_process_group first",
        )
    if distributed.get_rank(group) < 0:
        raise wrong_value("group", "hold this process", "a group without it")
    return distributed.get_world_size(group)


def _check_expect(expect: object, ranks: int) -> None:
    if isinstance(expect, Expected) or not isinstance(expect, Sequence):
        raise wrong_type(
            "expect", "be a sequence with an Expected or None for each rank", kind(expect)
        )
    if len(expect) != ranks:
        raise wrong_value("expect", f"hold one entry for each of {ranks} ranks", len(expect))
    for rank, form in enumerate(expect):
        if not (form is None or isinstance(form, Expected)):
            raise wrong_type(
                f"expect[{rank}]", "be Expected(message, fingerprint) or None", kind(form)
            )


def _check_claims(claims: list[list[int]]) -> None:
    """Refuse before memory is taken, from numbers that all ranks see alike: so all refuse, or none."""
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
        raise wrong_value(f"expect[{rank}]", f"be given where rank {rank} sends a message", None)
    try:
        return decode_payload(blob, expect=expect, max_bytes=max_bytes)[0]
    except ValueError as error:
        raise ValueError(f"rank {rank}: {error}") from error


def _agree(
    error: Exception | None, row: list[int], group: "distributed.ProcessGroup | None"
) -> list[list[int]]:
    """Tell all ranks whether this one can go on, with a row of numbers; the rows of all of them, or an error on every rank."""
    rows = [
        each.tolist()
        for each in _all_gather(
            torch.tensor([error is not None, *row], dtype=torch.int64, device="cpu"), group
        )
    ]
    if error is not None:
        raise error
    if failed := [rank for rank, (raised, *_) in enumerate(rows) if raised]:
        raise wrong_value(
            "message",
            "be sent and accepted by every rank",
            f"errors on ranks {failed}, which say why",
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
