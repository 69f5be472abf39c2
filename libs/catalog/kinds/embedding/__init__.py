"""Models that embed: dense, sparse and multi-vector."""
