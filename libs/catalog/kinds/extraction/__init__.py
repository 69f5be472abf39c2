"""Zero-shot models that find entities, relations and structures in texts."""
