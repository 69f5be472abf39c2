"""GLiREL: relations between the request's entities, with its labels."""
