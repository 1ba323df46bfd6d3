"""A hook of MkDocs that gives every file of the site the path that it has in the repository.

Links between pages are written for readers of the repository, for example `../strategies/kfkb/README.md` in a page of
docs/. With the same paths in the site, these links are valid there, too.
"""

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

PATTERNS = [
    "*.md",
    "benchmarks/**/*.md",
    "docs/**/*.md",
    "docs/**/*.png",
    "examples/*.py",
    "strategies/*/README.md",
]
"""The files of the site, relative to the root of the repository."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replace the files of docs/ by the files that match `PATTERNS`. README.md becomes the first page."""
    root = Path(config.config_file_path or "").parent
    for file in [*files.documentation_pages(), *files.media_files()]:
        if file.src_dir == config.docs_dir:
            files.remove(file)
    for path in sorted({path for pattern in PATTERNS for path in root.glob(pattern)}):
        files.append(File(str(path.relative_to(root)), str(root), config.site_dir, config.use_directory_urls))
    return files
