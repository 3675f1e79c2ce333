"""Class logits from image features and text features."""

from fedprompt.matching.logits import cosine_logits, transport_logits

__all__ = ["cosine_logits", "transport_logits"]
