"""GLiNER2's first architecture, which scores all spans of a limited width."""
