"""Models that read images and write texts (`libs/models/readers`)."""
