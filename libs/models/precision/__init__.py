"""A model in int8, and how near its answers are to those of a wider format, by built-in samples."""
