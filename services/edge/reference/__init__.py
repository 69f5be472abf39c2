"""The page `/docs`: the OpenAPI document, rendered in the browser by RapiDoc. It contacts no other
host.
"""

from services.edge.reference.page import reference_answers

__all__ = ["reference_answers"]
