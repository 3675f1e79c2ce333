"""A server with faulty clients ends as a server with the honest clients alone."""

import random
import struct
from collections import Counter
from functools import partial
from itertools import count, cycle, islice
from typing import NamedTuple

import pytest
import torch

from blobs import content, flipped, overwritten
from fedprompt import Weighted, descend, ema, update_by_name, weighted_mean
from fedprompt.codecs import int8
from fedprompt.interfaces import Payload
from fedprompt.wire import Expected, Header, encode_payload, receive
from same import assert_same

PARTS = {"backbone": "vit_tiny", "classes": "cat, dog"}
SHAPES = {"prompts": (2, 3, 4), "groups": (3, 4), "keys": (5, 4), "guides": (6, 4)}
ROWS = {"prompts": (), "groups": (), "keys": (5,), "guides": (6,)}  # of what there is a weight
VALUES = {
    name: torch.linspace(-1, 1, torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)
    for name, shape in SHAPES.items()
}
VALUES["prompts"] = VALUES["prompts"].float()
LIKE = {name: Weighted(VALUES[name], torch.zeros(rows)) for name, rows in ROWS.items()}
CODEC = int8()


def shortened(payload):
    """Encode the prompts in eight bits."""
    short, _ = CODEC.encode({"prompts": payload["prompts"]}, {})
    return {name: payload[name] for name in payload if name != "prompts"} | short


def restored(message):
    whole = {name: message[name] for name in LIKE if name in message}
    short = {name: message[name] for name in message if name not in whole}
    return CODEC.decode(short, like={"prompts": LIKE["prompts"]}) | whole


EXPECT = Expected(shortened(LIKE), PARTS)
MAX_BYTES = 4000

# The server. All that faults need of its loop is `receive`.

aggregate = weighted_mean
guides = descend(partial(torch.optim.SGD, lr=0.3, momentum=0.9))
update = update_by_name({"groups": ema(decay=0.5), "keys": ema(decay=0.9), "guides": guides})


def serve(channel):
    """Run rounds without end, and yield the state of the server after each."""
    values, state = VALUES, update.init(VALUES)
    for server_round in count():
        expect, arrivals = EXPECT._replace(server_round=server_round), channel(server_round, values)
        accepted, refused = receive(arrivals, expect=expect, max_bytes=MAX_BYTES, restore=restored)
        values, state = update.step(values, aggregate(accepted.values()), state)
        yield values, state, accepted, refused


def serve_honest(num_clients):
    """Run the same rounds with the honest clients alone, without bytes."""
    values, state = VALUES, update.init(VALUES)
    for server_round in count():
        sent = uploads(
            values, server_round, fates_of(server_round, num_clients), ("whole", "twice")
        )
        payloads = [restored(shortened(upload.payload)) for upload in sent]
        values, state = update.step(values, aggregate(payloads), state)
        yield values


# The clients. Their payloads depend on the broadcast, so errors persist over rounds.


class Upload(NamedTuple):
    payload: Payload
    client: int
    server_round: int

    def blob(self, names=None, *, instead=None, **other):
        message = shortened(self.payload).items()
        message = {name: entry for name, entry in message if names is None or name in names}
        header = Header(PARTS, self.server_round, str(self.client))._replace(**other)
        return encode_payload(message | (instead or {}), header=header)


SHARES = {"absent": 30, "twice": 5, "late": 5, "rubbish": 5, "whole": 55}  # per cent


def fates_of(server_round, num_clients):
    """Draw the fate of each client's payload; the numbers of fates are fixed."""
    fates = [fate for fate, share in SHARES.items() for _ in range(num_clients * share // 100)]
    random.Random(server_round).shuffle(fates)
    return fates


def uploads(values, server_round, fates, wanted):
    """Make the payloads of the clients with a wanted fate; some rows are unknown."""
    generator = torch.Generator().manual_seed(server_round)
    noise = {
        name: torch.randn(len(fates), *shape, dtype=torch.float64, generator=generator)
        for name, shape in SHAPES.items()
    }
    weight = {
        name: torch.randint(-3, 9, (len(fates), *rows), generator=generator).clamp(min=0).float()
        for name, rows in ROWS.items()
    }
    moved = {
        name: (0.9 * values[name] + 0.1 * noise[name]).to(values[name].dtype) for name in SHAPES
    }
    for client, fate in enumerate(fates):
        if fate in wanted:
            yield Upload(
                {name: Weighted(moved[name][client], weight[name][client]) for name in SHAPES},
                client,
                server_round,
            )


def bits(blob):
    return range(8 * len(blob))


INFINITE = {  # once it is restored, not before
    "prompts/codes": torch.full(SHAPES["prompts"], 127, dtype=torch.int8),
    "prompts/scale": Weighted(torch.tensor(3e38), torch.tensor(1.0)),
}
RUBBISH = {
    "one bit": lambda upload, draw: flipped(blob := upload.blob(), draw.choice(bits(blob))),
    "one bit of a number": lambda upload, draw: flipped(
        blob := upload.blob(), draw.choice(bits(blob)[8 * content(blob) :])
    ),
    "cut short": lambda upload, draw: (blob := upload.blob())[: draw.randrange(len(blob))],
    "NaN": lambda upload, draw: overwritten(upload.blob(), 0, struct.pack("<d", torch.nan)),
    "a scale that makes infinity": lambda upload, draw: upload.blob(instead=INFINITE),
    "a name less": lambda upload, draw: upload.blob({"keys", "guides"}),
    "another backbone": lambda upload, draw: upload.blob(
        fingerprint=PARTS | {"backbone": "vit_small"}
    ),
    "no fingerprint": lambda upload, draw: upload.blob(fingerprint={}),
    "a round ahead": lambda upload, draw: upload.blob(server_round=upload.server_round + 1),
    "under another's name": lambda upload, draw: upload.blob(client_id=str(upload.client + 1)),
    "too long": lambda upload, draw: bytes(MAX_BYTES + 1),
    "noise": lambda upload, draw: draw.randbytes(300),
}


class Clients:
    """Clients of the server: they keep the late payloads of a round, and count their faults."""

    def __init__(self, num_clients):
        self.num_clients, self.rubbish = num_clients, cycle(RUBBISH)
        self.late, self.done = [], Counter()

    def __call__(self, server_round, values):
        fates, draw = fates_of(server_round, self.num_clients), random.Random(server_round + 1000)
        arrivals, self.late = self.late, []
        for upload in uploads(values, server_round, fates, ("twice", "late", "rubbish", "whole")):
            fate = fates[upload.client]
            if fate == "rubbish":
                fate = next(self.rubbish)
                arrivals.append((upload.client, RUBBISH[fate](upload, draw)))
            else:
                where = self.late if fate == "late" else arrivals
                where += [(upload.client, upload.blob())] * (2 if fate == "twice" else 1)
            self.done[fate] += 1
        draw.shuffle(arrivals)
        yield from arrivals


@pytest.mark.parametrize("num_clients", [20, pytest.param(1000, marks=pytest.mark.slow)])
def test_clients_with_faults_end_where_the_honest_ones_alone_do(num_clients):
    """After 20 rounds the state is bitwise identical, and each fault has left one reason."""
    clients, refusals = Clients(num_clients), []
    rounds = serve(clients)
    for _ in range(20):
        values, _, accepted, refused = next(rounds)
        refusals.append(len(refused))
        assert len(accepted) == 0.6 * num_clients
    assert_same(values, next(islice(serve_honest(num_clients), 19, None)))
    # No upload is late in the first round.
    assert refusals == [0.1 * num_clients] + [0.15 * num_clients] * 19
    assert clients.done.keys() == {"whole", "twice", "late", *RUBBISH}
