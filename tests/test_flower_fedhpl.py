"""The client and server of the Flower example give the results of its plain loop.

``examples/flower_fedhpl/run.py`` compares them with runs in Flower.
"""

import socket
import struct
import threading

import federation
import launch
import run


def test_clients_rebuilt_for_each_message_give_the_results_of_the_plain_loop():
    server, states = federation.Server(), {client: {} for client in range(3)}
    answers, state = server.init()
    for server_round in range(federation.ARGS.rounds):
        payloads = {}
        for client in range(3):
            payloads[client], states[client] = federation.train(
                client, server_round, answers[client], states[client]
            )
        answers, state = server.step(payloads, state)
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
