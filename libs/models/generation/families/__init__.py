"""Families of generative models: each is built from its config.json and weights."""
