"""A client of the run's federation. Each message has a new process, so only its state is kept."""

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

import fedprompt as fp
from federations import FEDERATIONS
from fedprompt import flower

app = ClientApp()


def answer(message: Message, context: Context) -> Message:
    """Make the federation's own app and hand over to it."""
    federation = FEDERATIONS[str(context.run_config["federation"])]()

    def expect(client: int) -> fp.wire.Expected:
        return fp.wire.Expected(federation.broadcast_form(client), federation.fingerprint)

    return flower.client_app(federation.client, expect=expect, max_bytes=10**6)(message, context)


app.train()(answer)
app.query("client")(answer)
