"""The packed encoder that all families are assembled from: `spec.py` says what there is to choose, `encoder.py` assembles it."""
