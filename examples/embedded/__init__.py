"""Data and frozen models of the examples, without any download.

Tiny ViTs and a tiny CLIP are pretrained on printed glyphs. The target is real handwritten digits.
"""
