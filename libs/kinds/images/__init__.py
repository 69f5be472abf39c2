"""Models of images, or of texts and images, and detectors (`libs/models/images`)."""
