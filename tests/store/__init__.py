"""The model store, against servers that behave as hubs and object stores do."""
