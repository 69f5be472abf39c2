"""Models that see and do not write: of images, of texts and images in one space, and of pages."""
