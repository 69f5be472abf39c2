"""Kinds of models that extract: entities, relations, and what a schema asks for."""
