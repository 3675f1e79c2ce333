"""The app of each SuperNode."""

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

import task
from fedprompt import flower

app = ClientApp()


def handle(message: Message, context: Context) -> Message:
    """Make the client app of the run's method, and run it."""
    made = task.load(context.run_config, context.node_config)
    options = {**task.wire(made.method), "directory": task.folder(context.run_config, "clients")}
    own = made.federation
    if own is None:
        raise ValueError(
            "`data` must be in the node's configuration: --node-config 'data=\"...\"'."
        )
    return flower.client_app(made.method, own, tests=made.tests, **options)(message, context)


app.train()(handle)
app.evaluate()(handle)
app.query("client")(handle)
