"""Checkpoint directories of generative models, with tokenizers and chat templates, as they are
served.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import transformers
from tokenizers import Tokenizer

from libs.models.generation.decoding.rules import Ids
from tests.generation.checkpoints import CAUSAL, written
from tests.generation.checkpoints import write as write_weights
from tests.parity.checkpoints import Kind, write_tokenizer

TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}> {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think> </think> {% endif %}"
)
_TOKENIZERS: Mapping[str, Kind] = {
    "qwen3": "qwen3", "llama": "llama", "gemma2": "gemma2", "phi3": "phi3", "bart": "bart",
    "marian": "t5", "t5": "t5", "lfm2": "llama", "ministral3": "llama", "qwen3_5_text": "qwen3",
}  # fmt: skip
# Random weights repeat themselves; what may not be repeated makes every answer another one.
VARIED = {"no_repeat_ngram_size": 2, "repetition_penalty": 1.2, "suppress_tokens": [0]}


def write(
    name: str, directory: Path, generation: Mapping[str, object] | None = None
) -> transformers.PreTrainedModel:
    """Writes the directory, and returns transformers' model of it."""
    model = write_weights(name, directory, VARIED | dict(generation or {}))
    write_tokenizer(_TOKENIZERS[name], directory, 300)
    if name in CAUSAL:
        (directory / "chat_template.jinja").write_text(TEMPLATE)
    return model


def write_ending(name: str, directory: Path, **generation: object) -> None:
    """Write a checkpoint like `write`, with 512 positions and a token that ends answers.

    Lists of generation_config.json hold the texts of tokens.
    """
    write(name, directory)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    ids = {
        key: [tokenizer.token_to_id(token) for token in value]
        for key, value in generation.items()
        if isinstance(value, list)
    }
    _edit(
        directory / "generation_config.json",
        {"eos_token_id": tokenizer.token_to_id("<|im_end|>"), **generation, **ids},
    )
    _edit(directory / "config.json", {"max_position_embeddings": 512})
    _edit(directory / "tokenizer_config.json", {"model_max_length": 512})


def _edit(file: Path, values: Mapping[str, object]) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | dict(values)))


def reference(
    model: transformers.PreTrainedModel,
    directory: Path,
    text: str,
    most: int,
    instruction: str = "",
    turns: Sequence[tuple[str, str]] = (),
    **template_values: object,
) -> str:
    """Return the text that transformers generates for a text. `turns`: earlier messages with their
    roles.
    """
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    if model.config.is_encoder_decoder:
        ids: Ids = tokenizer(f"{instruction} {text}" if instruction else text, return_tensors="np")[
            "input_ids"
        ][0]
    else:
        messages = [{"role": "system", "content": instruction}] if instruction else []
        messages += [{"role": role, "content": said} for role, said in (*turns, ("user", text))]
        prompt = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **template_values
        )
        ids = tokenizer(prompt, add_special_tokens=False, return_tensors="np")["input_ids"][0]
    (found,) = written(model, [ids], most)
    return str(tokenizer.decode(found, skip_special_tokens=True)).strip()
