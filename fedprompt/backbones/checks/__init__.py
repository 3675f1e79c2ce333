"""Checks of backbones that you write or load."""
