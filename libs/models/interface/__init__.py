"""Types that all models share: requests, results, packed batches, and the protocols of models,
heads and processors.
"""
