"""The client library `shoal` and its command line, against a fake router over real gRPC."""
