"""Clients get results of all of a long text, and learn which texts were cut, through a mesh."""

from __future__ import annotations

import numpy as np
import pytest
import shoal
from shoal.errors import InvalidInput

from services.local.settings import MINILM
from tests.support.texts import words

TAGGER = "random/bert-entities"
LATE = "random/bert-late"
NEEDLE = " Penguins are flightless birds that swim in the cold southern ocean. "


def test_relevant_sentence_at_the_end_of_a_long_document_counts(client: shoal.Client) -> None:
    filler = " ".join(words()[:1500])
    documents = [filler + NEEDLE, filler, "The terms of a licence."]
    query = "Which birds swim?"
    cut = client.score(MINILM, query, documents)
    assert cut.usage.truncated_items == 2
    assert cut.scores[0] == pytest.approx(cut.scores[1], abs=1e-5)
    found = client.score(MINILM, query, documents, truncation="windows")
    assert (found.usage.truncated_items, found.usage.truncated_query) == (0, False)
    assert found.usage.input_tokens > 2 * 1500
    assert found.ranking[0] == 0
    assert found.scores[0] > found.scores[1] + 0.05
    np.testing.assert_allclose(found.scores[2], cut.scores[2], atol=1e-5)
    pair = client.score(LATE, "swim " * 40, [filler])
    assert pair.usage.truncated_query


def test_entities_of_long_texts_lie_in_the_whole_text(client: shoal.Client) -> None:
    text = " 東京 😀\r\n".join(" ".join(words()[start : start + 60]) for start in range(0, 900, 60))
    short = "A text of a few words."
    whole = client.entities(TAGGER, [short, text], truncation="windows", window_overlap=20)
    assert whole.usage.truncated_items == 0
    assert client.entities(TAGGER, [short, text]).usage.truncated_items == 1
    assert whole[1].entities[-1].end > len(text) // 2
    assert all(text[one.start : one.end] == one.text for one in whole[1].entities)
    (alone,) = client.entities(TAGGER, [short])
    assert [(one.start, one.end, one.label) for one in whole[0].entities] == [
        (one.start, one.end, one.label) for one in alone.entities
    ]
    with pytest.raises(InvalidInput) as refused:
        client.entities(TAGGER, [short, "a" * 1_100_000], truncation="windows")
    assert refused.value.field == "items[1].text"
    with pytest.raises(InvalidInput) as refused:
        client.entities(TAGGER, [short, text], truncation="windows", window_overlap=16_000)
    assert refused.value.field == "window_overlap"
