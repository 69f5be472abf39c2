"""`make cluster-check`, and what it finds in a real API server if one is given."""
