"""Models that read images and write text about them: an image encoder before the decode loop
(`libs/models/generation`).
"""
