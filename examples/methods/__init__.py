"""Generators of the gallery that are not yet methods of `fedprompt.methods`, and an adapter."""

from collections.abc import Callable, Iterator
from functools import partial, wraps

import fedprompt as fp


def as_generator(make: Callable[..., fp.Method], *, everyone: bool) -> Callable[..., Iterator]:
    """Make a generator of a method: (federation, **hyperparameters) -> predictions.

    Args:
        make: Function (setting, *, hyperparameters) -> :class:`fedprompt.Method`.
        everyone: Whether all clients predict with the same model.
    """
    from methods.federation import Predictions

    @wraps(make)
    def rounds(federation, **values):
        method = make(federation, **values)

        def train(data, answer, state):
            payload, state = method.client(data, federation.send_down(data.id, answer), state)
            return payload if payload is None else federation.send_up(data.id, payload), state

        def model(now, client):
            return now.model(method, federation.data(client, now.server_round))

        run = fp.run_rounds(method._replace(client=train), federation.data, federation.cohorts())
        for now in run:
            if everyone:
                yield Predictions(everyone=model(now, federation.clients[0]))
            else:
                new = partial(model, now._replace(clients={}))
                yield Predictions(client=partial(model, now), newcomer=new)

    return rounds
