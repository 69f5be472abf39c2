"""int8 models, and the agreement of their outputs with a wider format on built-in samples."""
