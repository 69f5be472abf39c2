"""huggingface_hub's InferenceClient."""

from checking import BASE, MODEL, TEXTS, VECTORS, check, distance, refused
from huggingface_hub import InferenceClient
from huggingface_hub.errors import HfHubHTTPError

prefix = InferenceClient(base_url=f"{BASE}/tei/{MODEL}", api_key="any")
embed = InferenceClient(base_url=f"{BASE}/tei/{MODEL}/embed", api_key="any")
hosted = InferenceClient(base_url=f"{BASE}/models/{MODEL}/pipeline/feature-extraction", api_key="any")


def similarity() -> float:
    found = prefix.sentence_similarity(TEXTS[0], other_sentences=TEXTS[1:3])
    wanted = [sum(a * b for a, b in zip(VECTORS[0], VECTORS[index], strict=True)) for index in (1, 2)]
    return distance([found], [wanted])


check("feature_extraction, prefix", lambda: distance(prefix.feature_extraction(TEXTS[0]), VECTORS[:1]))
check("feature_extraction, /embed", lambda: distance(embed.feature_extraction(TEXTS, normalize=True, truncate=True), VECTORS))
check("feature_extraction, hosted path", lambda: distance(hosted.feature_extraction(TEXTS[0]), VECTORS[:1]))
check("sentence_similarity", similarity)
check("errors", lambda: refused(HfHubHTTPError, lambda: embed.feature_extraction("")))
