"""All kinds, in the order in which they are asked for a directory. A new kind is a folder and its
name here, twice.
"""

from __future__ import annotations

from typing import Final

from libs.errors import ModelBroken
from libs.kinds.dense import card as dense
from libs.kinds.generative import card as generative
from libs.kinds.gliclass import card as gliclass
from libs.kinds.gliner import card as gliner
from libs.kinds.gliner2 import card as gliner2
from libs.kinds.glirel import card as glirel
from libs.kinds.hybrid import card as hybrid
from libs.kinds.image_generative import card as image_generative
from libs.kinds.images import card as images
from libs.kinds.kind import CheckpointPlace, Kind
from libs.kinds.laya import card as laya
from libs.kinds.multi_vector import card as multi_vector
from libs.kinds.nvembed import card as nvembed
from libs.kinds.sequence_labels import card as sequence_labels
from libs.kinds.sparse import card as sparse
from libs.kinds.static import card as static
from libs.kinds.token_labels import card as token_labels
from libs.kinds.vision_language import card as vision_language
from libs.kinds.yes_no import card as yes_no

KINDS: Final[tuple[Kind, ...]] = (
    vision_language.MERGED,
    # Directories with layouts of one package each.
    gliner.KIND,
    glirel.KIND,
    gliner2.KIND,
    gliclass.KIND,
    laya.KIND,
    nvembed.KIND,
    static.KIND,
    image_generative.KIND,
    images.KIND,
    vision_language.KIND,
    # The layout of transformers and sentence-transformers. modules.json and the model_type of
    # sentence-transformers take precedence over the architecture.
    multi_vector.KIND,
    sparse.KIND,
    hybrid.KIND,
    dense.KIND,
    yes_no.KIND,
    token_labels.KIND,
    generative.KIND,
    sequence_labels.KIND,
    dense.OTHERS,
)

NAMES: Final = tuple(sorted({kind.name for kind in KINDS}))
"""The values of `Card.kind`."""


def detect_kind(place: CheckpointPlace) -> Kind:
    """Return the kind of the checkpoint. Raises ModelBroken if none can serve it."""
    for kind in KINDS:
        if kind.claims(place):
            return kind
    raise ModelBroken(
        f"{place.directory}: is not of the kind {place.named!r}, which `detect.kind` of a card of "
        "the catalog names"
    )
