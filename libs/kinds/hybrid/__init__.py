"""Dense, sparse and multi-vector outputs from one forward pass (bge-m3)."""
