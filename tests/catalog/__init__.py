"""Cards: from checkpoint directories and from YAML."""
