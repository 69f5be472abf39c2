"""Kinds of extraction models: entities, relations, and the fields of a schema."""
