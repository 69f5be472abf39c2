"""Dense vectors: a pooled vector for each text, of one encoder or of two."""
