"""MkDocs hooks: vendor Mermaid, and make links out of docs/ lead to the repository."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT: Final = Path(__file__).parents[2]
MERMAID: Final = ROOT / ".cache/mermaid/package/dist/mermaid.min.js"
LINK: Final = re.compile(r"(?<!!)\[(?P<text>[^\]]*)\]\((?P<target>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")
FENCE: Final = re.compile(r"^(`{3,}|~{3,}).*?^\1", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add Mermaid, which Material would otherwise load from another host."""
    files.append(File.generated(config, "assets/mermaid.min.js", abs_src_path=str(MERMAID)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links to files and folders that are not pages into links to the repository, or into text
    if it has no address.
    """
    folder = (Path(config.docs_dir) / page.file.src_uri).parent

    def link(found: re.Match[str]) -> str:
        target = found["target"]
        path = (folder / target).resolve()
        if re.match(r"[a-z]+:", target) or not path.exists() or not path.is_relative_to(ROOT):
            return found[0]
        docs = Path(config.docs_dir)
        if (
            path.is_relative_to(docs)
            and files.get_file_from_path(path.relative_to(docs).as_posix()) is not None
        ):
            return found[0]
        if not config.repo_url:
            return found["text"]
        address = f"{config.repo_url.rstrip('/')}/blob/main/{path.relative_to(ROOT).as_posix()}"
        return f"[{found['text']}]({address}{found['anchor'] or ''})"

    parts, end = [], 0
    for fence in FENCE.finditer(markdown):
        parts += [LINK.sub(link, markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join(parts) + LINK.sub(link, markdown[end:])
