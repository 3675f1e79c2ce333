"""The app of each SuperNode."""

import federation
from fedprompt import flower

app = flower.client_app(
    federation.train, expect=federation.broadcast, max_bytes=federation.MAX_BYTES
)
