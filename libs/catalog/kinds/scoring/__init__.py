"""Models that score: rerankers, classifiers with fixed labels or with those of a request, and
choices among options.
"""
