"""Trunks and patch features of image models."""
