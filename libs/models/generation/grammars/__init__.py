"""Grammars: answers in a form that the request asks for.

`schemas.py` decides which JSON Schemas are taken, `matching.py` follows one while a text is
written, with llguidance, and `answers.py` reads what was written.
"""

from libs.models.generation.grammars.answers import fits, form_of
from libs.models.generation.grammars.matching import Grammar, Grammars
from libs.models.generation.grammars.schemas import FIELD

__all__ = ["FIELD", "Grammar", "Grammars", "fits", "form_of"]
