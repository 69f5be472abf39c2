"""Families of models that write: how each is built from its config.json and weights."""
