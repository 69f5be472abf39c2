"""Decides where models go, and how many workers a pool needs; the mesh also works without it (DESIGN.md sections 6 and 8)."""
