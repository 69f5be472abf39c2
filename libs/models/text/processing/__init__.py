"""Before and after the forward, on the host: texts to token ids, outputs to answers."""
