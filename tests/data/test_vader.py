"""The movie ratings are read from an archive of the known layout, once, into four parts."""

import io
import subprocess
import tarfile

import pytest

from tether.data import vader
from tether.data.builtin import read_source
from tether.data.ratings import Rating
from tether.data.vader import movie_part, part_of
from tether.errors import DataError

PARTS = ("proxy", "judge", "test", "prompts")
COUNT = 400


def tar_gz(members):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def archive():
    truth = [f"{n}\t{n / 100 - 2}\tFilm  number {n} caf\xe9".encode() for n in range(COUNT)]
    truth += [b"no tabs", b"x\tnan\ttext", b"y\t1.0\t ", b"z\t1.0\tbad \xff byte", b""]
    raters = [f"{n}\t0\t1.0\t[{n % 5}, -1]".encode() for n in range(COUNT - 1)]
    raters += [b"399\t0\t1.0\t[oops]"]
    inner = tar_gz(
        {
            "hutto_ICWSM_2014/movieReviewSnippets_GroundTruth.txt": b"\xef\xbb\xbf"
            + b"\r\n".join(truth),
            "hutto_ICWSM_2014/movieReviewSnippets_anonDataRatings.txt": b"\r\n".join(raters),
        }
    )
    name = "vaderSentiment-3.3.2/additional_resources/hutto_ICWSM_2014.tar.gz"
    return tar_gz({"vaderSentiment-3.3.2/setup.py": b"raise SystemExit", name: inner})


@pytest.fixture
def fetched(tmp_path, monkeypatch):
    """A cache in a fresh folder; the list grows by one for each fetch."""
    calls = []

    def fetch():
        calls.append(1)
        return archive()

    monkeypatch.setenv("TETHER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(vader, "_fetch_archive", fetch)
    return calls


def test_texts_scores_and_raters_are_read_and_odd_lines_counted(fetched, caplog):
    caplog.set_level("INFO", "tether.data.vader")
    ratings = {r.text: r for part in PARTS for r in movie_part(part)}
    assert len(ratings) == COUNT
    text = "Film  number 7 café"
    assert ratings[text] == Rating(text=text, score=-1.93, raters=(2.0, -1.0))
    assert ratings["Film  number 399 café"].raters == ()
    assert "400 rated snippets; left out as unreadable: 4 of texts, 1 of raters" in caplog.text


def test_the_archive_is_fetched_once_and_no_temporary_file_stays(fetched, tmp_path):
    first = movie_part("judge")
    assert movie_part("judge") == first
    assert len(fetched) == 1
    files = [path.name for path in (tmp_path / "cache").iterdir()]
    assert files == ["vader-movie-ratings-1.jsonl"]


def test_the_parts_are_disjoint_and_have_their_shares(fetched):
    parts = {name: {r.text for r in movie_part(name)} for name in PARTS}
    assert sum(map(len, parts.values())) == len(set().union(*parts.values())) == COUNT
    shares = {name: len(texts) / COUNT for name, texts in parts.items()}
    # 4 standard errors of a share of 400
    expected = {"proxy": 0.35, "judge": 0.35, "test": 0.10, "prompts": 0.20}
    assert shares == pytest.approx(expected, abs=0.095)


def test_the_same_text_in_other_case_and_spacing_is_in_the_same_part():
    for number in range(100):
        assert part_of(f"A  Film {number} ") == part_of(f"a film\t{number}")


def test_the_built_in_sources_are_the_proxy_ratings_and_the_prompts(fetched):
    rows = read_source("builtin:vader-movie-ratings", "f")
    assert [row["text"] for row in rows] == [r.text for r in movie_part("proxy")]
    prompts = read_source("builtin:vader-movie-prompts", "f")
    assert prompts == [{"prompt": r.text} for r in movie_part("prompts")]


def test_a_download_that_fails_says_what_to_do(tmp_path, monkeypatch):
    def offline(command, **_):
        return subprocess.CompletedProcess(command, 1, "", "one\nERROR: no network")

    monkeypatch.setenv("TETHER_CACHE", str(tmp_path))
    monkeypatch.setattr(subprocess, "run", offline)
    with pytest.raises(DataError, match=r"ERROR: no network\); check the network, or put vaderS"):
        movie_part("judge")


def test_an_archive_put_into_the_cache_is_used_only_if_it_is_the_known_one(tmp_path, monkeypatch):
    monkeypatch.setenv("TETHER_CACHE", str(tmp_path))
    (tmp_path / "vaderSentiment-3.3.2.tar.gz").write_bytes(archive())
    with pytest.raises(DataError, match="not the file we know"):
        movie_part("judge")


@pytest.mark.parametrize("damage", [b"text", archive()[:1500], tar_gz({"a": b"b"})])
def test_a_damaged_archive_is_an_error_and_caches_nothing(fetched, tmp_path, monkeypatch, damage):
    monkeypatch.setattr(vader, "_fetch_archive", lambda: damage)
    with pytest.raises(DataError, match="the archive"):
        movie_part("judge")
    assert list((tmp_path / "cache").iterdir()) == []
