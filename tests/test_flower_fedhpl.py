"""The client and server of the Flower example give the results of the FedHPL example.

``examples/flower_fedhpl/run.py`` compares them with runs in Flower.
"""

import socket
import struct
import threading
from argparse import Namespace
from functools import partial

import pytest
import torch

import federation
import fedprompt as fp
import launch
import run
from studies import fedhpl, report


@pytest.mark.slow
def test_client_and_server_give_the_results_of_the_example():
    """Class accuracies of every client and numbers of bytes equal those of the example's loop."""
    task, backbones, split = federation.setting()
    small = task._replace(test=task.test.first(100))
    args = Namespace(**vars(federation.ARGS), checkpoint=None)
    accuracy, ledger = fedhpl.federate("FedHPL", small, backbones, split, args)

    server, states = federation.Server(), {client: {} for client in range(3)}
    answers, state = server.init()
    for server_round in range(federation.ARGS.rounds):
        rounds = {
            client: federation.train(client, server_round, answers[client], states[client])
            for client in range(3)
        }
        payloads = {client: payload for client, (payload, _) in rounds.items()}
        states = {client: state for client, (_, state) in rounds.items()}
        answers, state = server.step(payloads, state)
        for client, state_dict in states.items():
            model = federation.new_model(client)
            model.load_state_dict(state_dict)
            predict = partial(fedhpl.logits, model, backbones[client])
            assert torch.equal(
                report.class_accuracy(predict, small, torch.device("cpu")),
                accuracy[server_round, client],
            )
        sent = sum(fp.num_bytes(payload) for payload in payloads.values())
        assert ledger.total(direction="up", server_round=server_round) == sent
    assert run.bits({"answers": answers, "payloads": payloads}) == run.bits(run.in_process())


def test_a_client_without_an_upload_keeps_its_last_teacher():
    server = federation.Server()
    answers, state = server.init()
    payloads = {client: federation.train(client, 0, answers[client], {})[0] for client in range(3)}
    first, state = server.step(payloads, state)
    second, _ = server.step({client: payloads[client] for client in (0, 2)}, state)
    assert run.bits({"": {1: second[1]}}) == run.bits({"": {1: first[1]}})
    assert run.bits({"": {0: second[0]}}) != run.bits({"": {0: first[0]}})


def test_a_changed_tensor_is_detected():
    outcome = run.in_process()
    other = run.bits(outcome)
    outcome["answers"][1]["teacher"].value[0, 0].neg_()
    assert run.bits(outcome) != other


class Link:
    """Process of a SuperLink that is running."""

    def poll(self) -> None:
        """Return None, because the process has not ended."""


def test_a_superlink_that_drops_its_first_connections_is_waited_for(monkeypatch):
    """A starting SuperLink may close a connection without an answer, or accept and reset it.

    urllib does not convert a reset to one of its own errors.
    """
    monkeypatch.setattr(launch.time, "sleep", lambda seconds: None)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(
            target=answer,
            args=(listening, [b"", None, b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"]),
        )
        thread.start()
        launch.wait_for(Link(), listening.getsockname()[1])
        thread.join()


def answer(listening: socket.socket, answers: list[bytes | None]) -> None:
    for each in answers:
        connection, _ = listening.accept()
        with connection:
            connection.recv(1000)
            if each is None:
                linger = struct.pack("ii", 1, 0)  # closing resets the connection
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            else:
                connection.sendall(each)
