"""Decides where models go, and how many workers a pool needs; the mesh also works without it."""
