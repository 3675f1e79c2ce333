"""The app of each SuperNode."""

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

import task
from fedprompt import flower

app = ClientApp()


def handle(message: Message, context: Context) -> Message:
    """Make the client app of the run's method, and run it."""
    method, federation, *_ = task.load(context.run_config)
    options = {**task.wire(method), "directory": task.folder(context.run_config, "clients")}
    return flower.client_app(method, federation, **options)(message, context)


app.train()(handle)
app.query("client")(handle)
