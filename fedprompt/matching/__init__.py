"""Class logits from image features and text features."""
