"""Aggregators of entries and payloads, and server updates."""
