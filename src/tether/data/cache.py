"""The folder for fetched data, and writing into it so that a killed run leaves no half file."""

import os
from pathlib import Path


def cache_dir() -> Path:
    """The cache folder, made where missing: $TETHER_CACHE, else ~/.cache/tether."""
    chosen = os.environ.get("TETHER_CACHE", "")
    folder = Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "tether"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def write_atomic(path: Path, text: str) -> None:
    """Write UTF-8 text so that the file is absent or whole, also with two writers at once."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8", newline="\n")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
