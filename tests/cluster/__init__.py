"""`make cluster-check`: tests of its decisions, and the checks against a real API server if any."""
