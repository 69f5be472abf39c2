"""Messages of TEI's gRPC API, generated from protos/tei by `make protos`."""
