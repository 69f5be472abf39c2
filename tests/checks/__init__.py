"""What `make check` does beside linters and types (tools/)."""
