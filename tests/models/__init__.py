"""`libs/models` beyond parity: memory, hostile checkpoints, answers."""
