"""The toy: the published rows to the printed digit, and our loop at the best bigram's objective."""

import json
import subprocess
import sys
from functools import cache

import pytest
import torch

from tether.cli import main
from tether.exact import markov
from tether.exact.history import with_history
from tether.models.trunk import final_hidden
from tether.observer import SilentObserver
from tether.study import toy, toy_article
from tether.study.toy_figure import draw_figure
from tether.study.toy_ground import draw, ground
from tether.study.toy_result import article_document, tether_document

SILENT = SilentObserver()


@cache
def known():
    return ground()


@cache
def article_reference():
    return toy_article.article_reference()


@cache
def tether(coefs=(0.3,), seeds=1):
    return tether_document(known(), coefs, seeds=seeds, observer=SILENT)


@cache
def article(coefs=(3.0,), seeds=1):
    return article_document(known(), coefs, seeds=seeds, observer=SILENT)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """As the command sets it; more threads only wait for each other here."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def printed(row):
    return f"{row.reported[0]:.2f}/{row.reported[1]:.2f}", list(row.samples[0])


def test_the_reference_comes_out_as_published():
    row = toy.row_of(known(), article_reference(), 0.0)
    assert printed(row) == ("0.84/-6.19", [4, 0, 1, 2, 6, 7])


@pytest.mark.parametrize(
    ("coefficient", "numbers", "sample"),
    [
        (0.0, "6.00/-23.08", [3, 3, 3, 3, 3, 3]),
        (1.0, "6.00/-23.08", [3, 3, 3, 3, 3, 3]),
        (3.0, "3.00/-13.73", [1, 3, 1, 3, 1, 3]),
    ],
)
def test_the_article_comes_out_to_the_printed_digit(coefficient, numbers, sample):
    row = toy_article.article_row(known(), article_reference(), coefficient, 0, SILENT)
    assert printed(row) == (numbers, sample)


def test_the_published_ratio_is_the_number_of_tokens_and_silences_the_better_half():
    first = toy_article.first_step(known().language, article_reference())
    assert first.ratio == 6.0
    sentences, scores = toy_article._batch(
        known().language, article_reference(), toy_article._generator(0)
    )
    logprobs = toy_article.token_logprobs(article_reference(), sentences, start=0)
    leaf = logprobs.clone().requires_grad_()
    better = toy_article.standardised(scores) > 0
    toy_article.published_loss(
        leaf, logprobs, logprobs, toy_article.standardised(scores), coefficient=0.0
    ).backward()
    assert first.silent == better.float().mean().item() > 0.3
    assert torch.equal(leaf.grad.abs().sum(1) == 0, better)


def test_the_published_advantage_has_sample_deviation_one():
    scores = toy_article.standardised(torch.tensor([0.0, 1.0, 1.0, 4.0]))
    assert scores.mean().item() == pytest.approx(0, rel=0, abs=1e-6)
    assert (scores.square().sum() / 3).item() == pytest.approx(1, rel=0, abs=1e-6)


def test_the_published_coefficient_does_not_know_the_reference():
    generator = torch.Generator().manual_seed(0)
    new, old, ref, other = torch.randn(4, 9, 6, generator=generator)
    advantages = torch.randn(9, generator=generator)

    def gradient(reference):
        leaf = new.clone().requires_grad_()
        toy_article.published_loss(leaf, old, reference, advantages, coefficient=3.0).backward()
        return leaf.grad

    assert torch.equal(gradient(ref), gradient(other))


def test_ppo_reaches_the_best_bigram_within_a_thousandth():
    (row,) = tether()["rows"]
    assert 0 <= row["objective_gap"] < 1e-3
    assert 0.99 <= row["bigram_efficiency"] <= 1
    assert row["efficiency"] < row["bigram_efficiency"]
    assert row["best_bigram_objective"] == pytest.approx(1.477275, rel=0, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kl_coef", [1.0, 0.5, 0.2, 0.1])
@pytest.mark.parametrize("seed", [0, 1])
def test_every_coefficient_reaches_its_best_bigram(kl_coef, seed):
    best = toy.best_bigram(known(), kl_coef)
    row = toy.tether_row(known(), kl_coef, seed, SILENT)
    assert 0 <= 1 - toy.objective(row) / best.objective < 1e-3
    assert toy.bigram_efficiency(row, best) > 0.99


def test_the_exact_figures_are_those_of_many_samples():
    generator = torch.Generator().manual_seed(1)
    law = torch.randn(8, 8, generator=generator, dtype=torch.float64).log_softmax(-1)
    standing = known().standing(law)
    sentences = draw(law, start=0, length=6, count=100_000, generator=generator)
    before = torch.cat([torch.zeros_like(sentences[:, :1]), sentences[:, :-1]], 1)
    reference, policy = known().reference[0][before, sentences], law[before, sentences]
    for exact, sampled in (
        (standing.reward, (sentences == 3).sum(1).double()),
        (standing.fluency, reference.sum(1)),
        (standing.kl, (policy - reference).sum(1)),
    ):
        assert abs(sampled.mean().item() - exact) < 4.5 * sampled.std().item() / 100_000**0.5


def test_the_least_kl_is_the_frontiers():
    assert known().least_kl(3.0) == pytest.approx(5.0875, rel=0, abs=1e-4)
    assert known().least_kl(0.5) == 0.0
    worst = (
        -6 * known().reference[0][3, 3] - known().reference[0][0, 3] + known().reference[0][3, 3]
    )
    assert known().least_kl(6.0) == pytest.approx(worst.item(), rel=0, abs=1e-6)
    point = known().optimum(0.3)
    assert known().least_kl(point.reward) == pytest.approx(point.kl, rel=0, abs=1e-9)


def test_best_of_n_is_that_of_all_sentences():
    """By drawing the best of four 25,000 times, and by the reward's distribution."""
    generator = torch.Generator().manual_seed(2)
    drawn = draw(known().reference[0], start=0, length=6, count=100_000, generator=generator)
    rewards = (drawn == 3).sum(1).double().reshape(-1, 4).amax(1)
    point = known().best_of(4)
    assert abs(point.reward - rewards.mean().item()) < 4.5 * rewards.std().item() / 25_000**0.5
    assert known().reward_levels().sum().item() == pytest.approx(1, rel=0, abs=1e-12)
    assert known().best_of(1).kl == pytest.approx(0, rel=0, abs=1e-12)
    assert 0 < point.kl < 4 and point.reward < known().optimum(1.0).reward + point.kl


def test_the_history_changes_no_probability_and_reads_the_same_with_a_cache():
    plain = known().language.reference
    lm = with_history(plain, steps=7)
    tokens = torch.tensor([[0, 1, 3, 3, 5, 2, 7], [0, 3, 2, 2, 2, 2, 2], [3, 3, 3, 3, 3, 3, 3]])
    assert torch.equal(lm(tokens).logits, plain(tokens).logits)
    whole = final_hidden(lm, tokens, torch.ones_like(tokens, dtype=torch.bool))
    cache, parts = None, []
    for t in range(7):
        read = lm.base_model(tokens[:, t : t + 1], past_key_values=cache, use_cache=True)
        cache = read.past_key_values
        parts.append(read.last_hidden_state)
    assert torch.equal(torch.cat(parts, 1), whole)
    assert (whole.sum(-1) == 10).all()
    assert whole.unique(dim=1).shape == whole.shape


@pytest.mark.slow
def test_several_seeds_give_means_and_spreads():
    document = article((3.0,), seeds=2)
    (row,) = document["rows"]
    rewards = [run["reward"] for run in row["runs"]]
    assert row["reward"] == pytest.approx(sum(rewards) / 2, rel=0, abs=1e-12)
    assert row["spread"]["reward"] == pytest.approx(
        abs(rewards[0] - rewards[1]) / 2**0.5, rel=0, abs=1e-9
    )
    assert article()["rows"][0]["spread"] == {}


@pytest.mark.slow
def test_the_figure_is_written_as_png_and_svg(tmp_path):
    files = draw_figure(known(), tether(), article(), tmp_path / "toy.png")
    png, svg = (tmp_path / "toy.png").read_bytes(), (tmp_path / "toy.svg").read_text()
    assert files == [str(tmp_path / "toy.png"), str(tmp_path / "toy.svg")]
    assert png.startswith(b"\x89PNG") and len(png) > 30_000
    assert svg.count("<path") > 30
    from matplotlib.image import imread

    pixels = imread(tmp_path / "toy.png")
    assert pixels.shape[1] > 1200 and pixels[..., :3].std() > 0.05


KEYS = {
    "coefficient", "reward", "fluency", "kl_nats_per_response", "least_kl", "efficiency",
    "distinct", "sample",
}  # fmt: skip


def test_json_is_one_document_with_the_contracts_keys(capsys):
    assert main(["toy", "--objective", "article", "--coefs", "3", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert {"reward", "fluency", "sample"} <= set(document["reference"])
    (row,) = document["rows"]
    assert set(row) >= KEYS
    assert row["kl_nats_per_response"] > 2.5 * row["least_kl"]
    assert row["published"]["sample"] == [1, 3, 1, 3, 1, 3]
    assert set(tether()["rows"][0]) >= KEYS


def test_the_table_says_how_far_the_article_is_from_the_frontier(capsys):
    assert main(["toy", "--objective", "article", "--coefs", "3"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "3.00/-13.73" in told and "1 3 1 3 1 3" in told
    assert "reward 3.00 for 13.7 nats, where 5.09 suffice" in told


MISTAKES = {
    "objective": (["--objective", "ppo"], "--objective"),
    "seeds": (["--seeds", "0"], "--seeds: got 0; it must be 1 to 100"),
    "coefs": (["--coefs", "0"], "--coefs: got 0.0"),
    "nan": (["--coefs", "nan"], "--coefs: got nan"),
    "article": (["--objective", "article", "--coefs", "-1"], "--coefs"),
    "word": (["--coefs", "many"], "--coefs"),
    "figure": (["--figure", "toy.pdf"], "a .png or .svg file"),
    "folder": (["--figure", "nowhere/toy.png"], "in a folder that exists"),
    "unknown": (["--steps", "3"], "unrecognized arguments"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_one_line_and_exit_code_2(case, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments, message = MISTAKES[case]
    assert main(["toy", *arguments]) == 2
    told = capsys.readouterr()
    assert told.out == "" and told.err.count("\n") == 1 and message in told.err
    assert list(tmp_path.iterdir()) == []


def test_help_imports_no_torch():
    code = (
        "import sys\nfrom tether.cli import main\n"
        "try:\n    main(['toy', '--help'])\nexcept SystemExit:\n    pass\n"
        "sys.exit(bool({'torch', 'matplotlib'} & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert "--objective" in result.stdout


def test_the_trained_law_is_read_in_full():
    settings = toy.recipe(0.5, seed=0, steps=1)
    ready = toy.prepared(known().language, settings, SILENT)
    law = toy.law_of(ready.policy)
    torch.testing.assert_close(law, known().reference[0], rtol=0, atol=1e-6)
    assert markov.stationary(law, length=6).shape == (6, 8, 8)
