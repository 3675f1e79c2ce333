"""Settings of the four papers as data, and what runs them."""
