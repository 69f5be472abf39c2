"""Models that write texts (`libs/models/generation`)."""
