"""Grammars: answers in a format that the request defines.

`schemas.py` validates JSON Schemas, `matching.py` constrains generation by one with llguidance, and
`answers.py` parses the generated text.
"""

from libs.models.generation.grammars.answers import fits, parse_answer
from libs.models.generation.grammars.matching import Grammar, Grammars
from libs.models.generation.grammars.schemas import FIELD

__all__ = ["FIELD", "Grammar", "Grammars", "fits", "parse_answer"]
