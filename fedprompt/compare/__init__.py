"""Methods of the gallery, and your own, on your data under one budget."""
