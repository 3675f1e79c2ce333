"""Learnable prompts for frozen backbones, and the forward pass that inserts them."""
