"""Which model is evicted."""
