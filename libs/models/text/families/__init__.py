"""One file for each architecture, in rooms by purpose: its model types, the names of its weights,
and `build`. What two families share belongs into `libs/models/layers`; what follows the encoder is
a kind."""
