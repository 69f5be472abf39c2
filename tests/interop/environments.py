"""The clients that `make interop` runs. Each has its own environment below .cache/interop, because
their pinned versions conflict.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
SCRIPTS: Final = Path(__file__).parent / "clients"
ENVIRONMENTS: Final = ROOT / ".cache/interop"
PIP: Final = ("-m", "pip", "--disable-pip-version-check")


@dataclass(frozen=True)
class Client:
    """A client.

    Attributes:
        script: The path of its script below clients/.
        install: Arguments of pip, or of npm for a Node script.
        versions: The packages with versions in the table.
        note: Distinguishes clients with the same packages in the table.
    """

    name: str
    script: str
    install: Sequence[Sequence[str]]
    versions: Sequence[str]
    note: str = ""

    @property
    def is_node(self) -> bool:
        return self.script.endswith(".mjs")

    @property
    def place(self) -> Path:
        """Return its environment's path."""
        return ENVIRONMENTS / self.name


CLIENTS: Final = (
    Client("openai", "use_openai.py", (("openai",),), ("openai",)),
    Client(
        "openai-old", "use_openai.py", (("openai==1.40.0", "httpx<0.28"),), ("openai",), " (oldest)"
    ),
    Client("cohere", "use_cohere.py", (("cohere", "voyageai"),), ("cohere", "voyageai")),
    Client("hub", "use_hub.py", (("huggingface_hub", "numpy"),), ("huggingface_hub",)),
    Client("ollama", "use_ollama.py", (("ollama",),), ("ollama",)),
    Client(
        "sie",
        "use_sie.py",
        (
            ("--no-deps", "--ignore-requires-python", "sie-sdk==0.10.1"),
            (
                "aiohttp",
                "httpx<1",
                "msgpack",
                "msgpack-numpy",
                "numpy<2.5",
                "pillow",
                "pyyaml",
                "websockets<15",
            ),
        ),
        ("sie-sdk",),
    ),
    Client("kserve", "use_kserve.py", (("tritonclient[http]",),), ("tritonclient",)),
    Client("infinity", "use_infinity.py", (("infinity-client", "numpy"),), ("infinity-client",)),
    Client(
        "haystack",
        "frameworks/use_haystack.py",
        (("huggingface-api-haystack[grpc]", "numpy"),),
        ("huggingface-api-haystack", "haystack-ai"),
    ),
    Client(
        "haystack-more",
        "frameworks/use_haystack_more.py",
        (("haystack-ai", "cohere-haystack", "jina-haystack"),),
        ("cohere-haystack", "jina-haystack", "haystack-ai"),
    ),
    Client(
        "langchain",
        "frameworks/use_langchain.py",
        (
            (
                "langchain-openai",
                "langchain-cohere",
                "langchain-huggingface",
                "langchain-ollama",
                "langchain-voyageai",
            ),
        ),
        (
            "langchain-openai",
            "langchain-cohere",
            "langchain-huggingface",
            "langchain-ollama",
            "langchain-voyageai",
        ),
    ),
    Client(
        "llamaindex",
        "frameworks/use_llama_index.py",
        (
            (
                "llama-index-embeddings-openai-like",
                "llama-index-embeddings-text-embeddings-inference",
                "llama-index-embeddings-cohere",
                "llama-index-postprocessor-cohere-rerank",
                "llama-index-postprocessor-tei-rerank",
                "llama-index-postprocessor-jinaai-rerank",
            ),
        ),
        ("llama-index-core", "llama-index-embeddings-openai-like", "llama-index-embeddings-cohere"),
    ),
    Client(
        "stores",
        "frameworks/use_stores.py",
        (("chromadb", "lancedb", "openai", "ollama"),),
        ("chromadb", "lancedb"),
    ),
    Client("litellm", "frameworks/use_litellm.py", (("litellm",),), ("litellm",)),
    Client("rerankers", "frameworks/use_rerankers.py", (("rerankers[api]",),), ("rerankers",)),
    Client("node", "use_openai.mjs", (("openai@6.49.0",),), ("openai",)),
    Client(
        "nodemore",
        "use_more.mjs",
        (("cohere-ai@8.1.0", "ollama@0.6.4", "@huggingface/inference@4.13.30"),),
        ("cohere-ai", "ollama", "@huggingface/inference"),
    ),
    Client(
        "nodestack",
        "frameworks/use_stack.mjs",
        (
            (
                "@langchain/openai@1.6",
                "@ai-sdk/openai-compatible@3",
                "ai@7",
                "@chroma-core/huggingface-server",
                "@chroma-core/ollama",
            ),
        ),
        ("@langchain/openai", "ai", "@chroma-core/huggingface-server", "@chroma-core/ollama"),
    ),
)
CL100K: Final = "9b5ad71b2ce5302211f9c61530b329a4922fc6a4"
"""The name of the cl100k_base file in packages that contain it."""


def install(client: Client) -> Path:
    """Return the program that runs the client's script. An existing environment is reused."""
    place = client.place
    done = place / ".done"
    if client.is_node:
        if not done.exists():
            place.mkdir(parents=True, exist_ok=True)
            subprocess.run(
                ["npm", "install", "--silent", "--prefix", str(place), *client.install[0]],
                check=True,
            )
            done.touch()
        return Path(shutil.which("node") or "node")
    python = place / "bin/python"
    if not done.exists():
        subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
        for arguments in client.install:
            subprocess.run([str(python), *PIP, "install", "-q", *arguments], check=True)
        done.touch()
    return python


def script_of(client: Client) -> Path:
    """Return the script to run. Node searches modules from the script's folder, so its script is
    copied next to them.
    """
    script = SCRIPTS / client.script
    if not client.is_node:
        return script
    shutil.copy(SCRIPTS / "checking.mjs", client.place)
    return Path(shutil.copy(script, client.place))


def versions(client: Client, program: Path) -> str:
    if client.is_node:
        packages = client.place / "node_modules"
        found = (
            (name, json.loads((packages / name / "package.json").read_text())["version"])
            for name in client.versions
        )
        return f"{', '.join(f'{name} {version}' for name, version in found)} (npm){client.note}"
    code = (
        "import sys; from importlib.metadata import version as v; print(', '.join(f'{n} {v(n)}' "
        "for n in sys.argv[1:]))"
    )
    reported = subprocess.run(
        [str(program), "-c", code, *client.versions], check=True, capture_output=True, text=True
    )
    return reported.stdout.strip() + client.note


def tokenizer_of_openai() -> Path:
    """Return the path of the cl100k_base file, which llama-index-core and litellm contain. Install
    llama-index-core without its requirements if no environment contains either.
    """
    found = next(ENVIRONMENTS.glob(f"**/site-packages/**/{CL100K}"), None)
    if found is not None:
        return found
    place = ENVIRONMENTS / "tokenizer/site-packages"
    command = ["install", "-q", "--no-deps", "--target", str(place), "llama-index-core"]
    subprocess.run([sys.executable, *PIP, *command], check=True)
    return next(place.glob(f"**/{CL100K}"))
