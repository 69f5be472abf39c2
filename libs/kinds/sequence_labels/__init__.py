"""Cross-encoders, classifiers and zero-shot classification by entailment."""
