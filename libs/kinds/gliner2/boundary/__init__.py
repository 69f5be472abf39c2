"""GLiNER2's second architecture, which scores pairs of starts and ends."""
