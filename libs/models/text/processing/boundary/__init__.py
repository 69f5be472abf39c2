"""The processor of GLiNER2.5, with what it makes of the spans that `heads/boundary/` has scored."""
