"""Late interaction (ColBERT): one vector for each token."""
