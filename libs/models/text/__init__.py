"""What reads text: `registry.py` and `families/` make a checkpoint's encoder, `kinds/` choose its `heads/` and `processing/`."""
