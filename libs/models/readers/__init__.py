"""Models that read images and generate text about them: an image encoder in front of the decode
loop (`libs/models/generation`)."""
