"""Models of an encoder and a decoder."""
