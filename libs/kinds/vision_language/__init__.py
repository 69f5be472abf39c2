"""Vision-language models that retrieve (`libs/models/images/vlm`)."""
