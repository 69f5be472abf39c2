"""GLiNER: entities, and in some models relations, with the request's labels."""
