"""What reads text: `registry.py` and `families/` make the encoder of a checkpoint, `kinds/` choose its `heads/` and `processing/`."""
