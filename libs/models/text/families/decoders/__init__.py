"""Language models, causal unless a checkpoint says otherwise."""
