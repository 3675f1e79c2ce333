"""Text towers of CLIP models."""
