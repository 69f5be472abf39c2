"""GLiNER2: entities, classes, relations and structures of a request's schema."""
