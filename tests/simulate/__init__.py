"""`shoal simulate`: the simulator against the rules that it copies."""
