"""GLiClass: zero-shot classification with all labels in one forward pass."""
