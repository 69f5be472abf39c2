"""GLiNER2.5 scores spans by their start and end. `processing/boundary/` reads the head's output."""
