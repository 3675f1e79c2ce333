"""A federated method as three functions, and the state after a round.

Every engine runs the same objects: one process, ranks, Flower.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from fedprompt.interfaces.nouns import Message

State = Mapping[str, Any]
"""What a client or the server remembers: a tree as of :func:`fedprompt.save_checkpoint`."""


class Server(NamedTuple):
    """Server of a method. Its functions change no argument.

    Attributes:
        state: State before the first round, a tree as of :func:`save_checkpoint`. Client ids in it
            are strings; an optimizer is its :func:`optimizer_state`.
        answer: Function (client, state) -> message. It is called for the clients of a cohort and
            for every client that predicts, new ones included. So it must be cheap.
        step: Function (server_round, payloads, state) -> state. The payloads are a dict by client
            id, in the order of ids, with at least one client.
    """

    state: State
    answer: Callable[[int, State], Message]
    step: Callable[[int, Mapping[int, Message], State], State]


class Method(NamedTuple):
    """Federated method: a client function, a server and a prediction.

    Client functions receive the data of one client. They remember things between rounds only in the
    state that they return. A client that never trained has the state ``{}``.

    Attributes:
        client: Function (data, answer, state) -> (payload, state): one exchange of one client. A
            payload ``{}`` is a legal message. With the payload None, nothing is sent.
        server: Server.
        predict: Function (data, answer, state) -> model. Personalization belongs here.
        exchanges: Number of exchanges in a round (at least 1). With 3, each client of the cohort
            gets three answers and sends three payloads in a round.
        form: Function from a client id to a payload with its names, shapes and dtypes; numbers are
            not read. Codecs and Flower need it. If None, the method runs in one process and on the
            ranks of one owner.
    """

    client: Callable[[Any, Message, State], tuple[Message | None, State]]
    server: Server
    predict: Callable[[Any, Message, State], Any]
    exchanges: int = 1
    form: Callable[[int], Message] | None = None


class Round(NamedTuple):
    """State after a round: those of the server and of the clients, from which a run continues.

    It is a tree as of :func:`save_checkpoint`, and :func:`load_checkpoint` returns a round again.

    Attributes:
        server_round: Round that ended (0-based).
        server: State of the server.
        clients: State of each client that ever took part, by its id as a string. With ranks, these
            are the clients of this rank.
    """

    server_round: int
    server: State
    clients: Mapping[str, State]

    def model(self, method: Method, data: Any) -> Any:
        """Return the model with which a client predicts after this round.

        Args:
            method: Method that made this round.
            data: Data of the client, for example ``federation.data(client, now.server_round)``.
        """
        answer = method.server.answer(data.id, self.server)
        return method.predict(data, answer, self.clients.get(str(data.id), {}))
