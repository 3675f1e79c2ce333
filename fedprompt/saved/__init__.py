"""Trained parts in folders: a state, a description and a card."""
