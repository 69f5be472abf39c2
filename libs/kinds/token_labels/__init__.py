"""Token classifiers: entities of a fixed set of labels."""
