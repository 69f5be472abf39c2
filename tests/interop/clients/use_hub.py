"""huggingface_hub's InferenceClient."""

import asyncio

from checking import (
    ALONE,
    BASE,
    CLASSIFIER,
    EXPECTED,
    LIMITED,
    MODEL,
    TAGGER,
    TEXTS,
    VECTORS,
    WAITED,
    check,
    distance,
    labelled,
    refusal,
    reports_retry_after,
)
from huggingface_hub import AsyncInferenceClient, InferenceClient
from huggingface_hub.errors import HfHubHTTPError

prefix = InferenceClient(base_url=f"{BASE}/tei/{MODEL}", api_key="any")
embed = InferenceClient(base_url=f"{BASE}/tei/{MODEL}/embed", api_key="any")
classifier = InferenceClient(base_url=f"{BASE}/tei/{CLASSIFIER}", api_key="any")
limited = InferenceClient(base_url=f"{LIMITED}/tei/{MODEL}/embed", api_key="any")
tagger = InferenceClient(base_url=f"{BASE}/models/{TAGGER}", api_key="any")
hosted = InferenceClient(
    base_url=f"{BASE}/models/{MODEL}/pipeline/feature-extraction", api_key="any"
)


def similarity() -> float:
    found = prefix.sentence_similarity(TEXTS[0], other_sentences=TEXTS[1:3])
    wanted = [
        sum(a * b for a, b in zip(VECTORS[0], VECTORS[index], strict=True)) for index in (1, 2)
    ]
    return distance([found], [wanted])


def classes() -> float:
    best = classifier.text_classification(TEXTS[0], top_k=1)
    assert len(best) == 1
    found = {one.label: one.score for one in classifier.text_classification(TEXTS[0])}
    assert best[0].score == max(found.values())
    return labelled(found, EXPECTED["one_class"][0])


def zero_shot() -> float:
    found = classifier.zero_shot_classification(
        TEXTS[0], ["fish", "wood"], hypothesis_template="About {}."
    )
    assert [one.score for one in found] == sorted((one.score for one in found), reverse=True)
    return labelled({one.label: one.score for one in found}, EXPECTED["zero_shot"][0])


def asynchronous() -> float:
    client = AsyncInferenceClient(base_url=f"{BASE}/tei/{MODEL}/embed", api_key="any")
    return distance(asyncio.run(client.feature_extraction(TEXTS)), VECTORS)


def errors() -> None:
    empty = refusal(HfHubHTTPError, lambda: embed.feature_extraction(""))
    assert empty.response.status_code == 400, empty
    nobody = InferenceClient(base_url=f"{BASE}/tei/nobody/embed", api_key="any")
    unknown = refusal(HfHubHTTPError, lambda: nobody.feature_extraction("a"))
    assert unknown.response.status_code == 404, unknown


def seconds(error: HfHubHTTPError) -> float:
    assert error.response.status_code == 429
    return int(error.response.headers["retry-after"])


def tokens() -> float:
    largest = 0.0
    for text, wanted in zip(TEXTS, EXPECTED["entities"], strict=True):
        found = tagger.token_classification(text)
        assert [(one.entity_group, one.start, one.end) for one in found] == [
            (one[0], one[2], one[3]) for one in wanted
        ]
        assert [one.word for one in found] == [text[one.start : one.end] for one in found]
        largest = max(
            [
                largest,
                *(
                    abs(one.score - expected[1])
                    for one, expected in zip(found, wanted, strict=True)
                ),
            ]
        )
    assert all(
        one.entity for one in tagger.token_classification(TEXTS[0], aggregation_strategy="none")
    )
    return largest


check("feature_extraction, prefix", lambda: distance(prefix.feature_extraction(TEXTS[0]), ALONE))
check(
    "feature_extraction, /embed",
    lambda: distance(embed.feature_extraction(TEXTS, normalize=True, truncate=True), VECTORS),
)
check(
    "feature_extraction, hosted path", lambda: distance(hosted.feature_extraction(TEXTS[0]), ALONE)
)
check("sentence_similarity", similarity)
check("text_classification", classes)
check("zero_shot_classification", zero_shot)
check("token_classification", tokens)
check("AsyncInferenceClient.feature_extraction", asynchronous)
check("errors", errors)
check(
    f"feature_extraction, repeated by its caller {WAITED}",
    lambda: reports_retry_after(
        HfHubHTTPError, lambda: distance(limited.feature_extraction(TEXTS), VECTORS), seconds
    ),
)
