"""The processor of GLiNER2.5, which selects from the spans scored by `heads/boundary/`."""
