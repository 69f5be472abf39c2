"""Models that write texts, from texts or from images."""
