"""Adapters for timm, open_clip and transformers; no other package imports these libraries."""
