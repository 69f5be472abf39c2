"""Generative models (`libs/models/generation`)."""
