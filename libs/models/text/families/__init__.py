"""One file for each architecture, in packages by purpose: its model types, the names of its
weights, and `build`. Code that two families share belongs in `libs/models/layers`; code after the
encoder belongs in a kind."""
