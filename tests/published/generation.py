"""Generative models: the mesh answers with the texts of transformers' greedy generation (or its
beams) on the same files.

A comparison is called with a client of a mesh that serves the model, the model's id and the
directory of its files.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import shoal
import torch
import transformers
from tokenizers import AddedToken, Tokenizer

from libs.models.readers.florence import _ADDED
from libs.models.readers.florence_tasks import TASKS
from tests.generation.served import reference
from tests.published.inputs import IMAGES, TEXTS
from tests.readers import conversation_models, florence_models, page_models

MAX_TOKENS: Final = 64
"""Tokens of a text."""


def texts(
    client: shoal.Client,
    model: str,
    directory: Path,
    *,
    instruction: str = "",
    max_tokens: int = MAX_TOKENS,
) -> None:
    """Models that read and write texts."""
    wanted = _written(directory, instruction, max_tokens)
    _same(
        client.extract(
            model,
            TEXTS,
            shoal.ReadText(instruction=instruction, max_tokens=max_tokens, temperature=0),
        ),
        wanted,
    )


def _written(directory: Path, instruction: str, max_tokens: int) -> list[str]:
    """Return the package's texts; its model is freed on return, before the mesh loads one.

    `_said` is a separate function for the same reason.
    """
    kind = transformers.AutoConfig.from_pretrained(directory)
    loads = (
        transformers.AutoModelForSeq2SeqLM
        if kind.is_encoder_decoder
        else transformers.AutoModelForCausalLM
    )
    theirs = loads.from_pretrained(directory, dtype=torch.float32).eval()
    return [reference(theirs, directory, text, max_tokens, instruction) for text in TEXTS]


def conversation(
    client: shoal.Client,
    model: str,
    directory: Path,
    *,
    instruction: str,
    max_tokens: int = MAX_TOKENS,
) -> None:
    """Vision-language models with a chat template."""
    ids, ends = _said(directory, instruction, max_tokens)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    keeps_tags = tokenizer.token_to_id("<doctag>") is not None
    kept = [[each for each in one if not keeps_tags or each not in ends] for one in ids]
    wanted = [tokenizer.decode(one, skip_special_tokens=not keeps_tags).strip() for one in kept]
    _same(
        client.extract(
            model,
            IMAGES,
            shoal.ReadText(instruction=instruction, max_tokens=max_tokens, temperature=0),
        ),
        wanted,
        ids,
    )


def _said(directory: Path, instruction: str, max_tokens: int) -> tuple[list[list[int]], set[int]]:
    """The tokens about each image, and those that end a text."""
    theirs = transformers.AutoModelForImageTextToText.from_pretrained(
        directory, dtype=torch.float32
    ).eval()
    ends = theirs.generation_config.eos_token_id
    ids = [
        conversation_models.written(theirs, directory, [image], instruction, max_tokens)
        for image in IMAGES
    ]
    return ids, {*ends} if isinstance(ends, list) else {ends}


def florence(client: shoal.Client, model: str, directory: Path) -> None:
    """Florence-2, in either layout, asked to read and to describe."""
    theirs = florence_models.read(directory)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    if tokenizer.token_to_id("<loc_0>") is None:  # microsoft's code adds them
        tokenizer.add_special_tokens(
            [AddedToken(f"<{each}>", special=True, normalized=False) for each in _ADDED]
        )
    for kind, task in (("ocr", "<OCR>"), ("detailed_caption", "<MORE_DETAILED_CAPTION>")):
        ids = [
            florence_models.written(theirs, directory, image, TASKS[task].prompt, MAX_TOKENS)
            for image in IMAGES
        ]
        found = client.extract(model, IMAGES, shoal.ReadText(kind=kind, max_tokens=MAX_TOKENS))  # type: ignore[arg-type]
        _same(found, [_plain(tokenizer, each) for each in ids], ids)


def page(
    client: shoal.Client,
    model: str,
    directory: Path,
    *,
    prompt: str = "",
    max_tokens: int = MAX_TOKENS,
) -> None:
    """TrOCR, and Donut by the `prompt` of its task."""
    theirs = transformers.VisionEncoderDecoderModel.from_pretrained(
        directory, dtype=torch.float32
    ).eval()
    ids = [page_models.written(theirs, directory, image, max_tokens, prompt) for image in IMAGES]
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    found = client.extract(model, IMAGES, shoal.ReadText(instruction=prompt, max_tokens=max_tokens))
    _same(
        found,
        [_plain(tokenizer, each) if prompt else tokenizer.decode(each).strip() for each in ids],
        ids,
    )


def _plain(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Decode with all tokens except those that frame a text."""
    text = tokenizer.decode(ids, skip_special_tokens=False)
    for token in ("<s>", "</s>", "<pad>"):
        text = text.replace(token, "")
    return text.strip()


def _same(found: Any, wanted: Sequence[str], ids: Sequence[Sequence[int]] | None = None) -> None:
    """Compare texts, and the token count with `ids`, the tokens of the wanted texts."""
    assert [one.text for one in found] == list(wanted)
    assert any(wanted), "nothing was written, so nothing was compared"
    if ids is not None:
        assert found.usage.output_tokens == sum(map(len, ids))
