"""The self-test passes, sees every known mistake, and puts everything back."""

import json
import sys
from pathlib import Path

import pytest
import torch

from tether.cli import main
from tether.core.kl import k1
from tether.exact.selftest import known, run
from tether.exact.selftest.bench import Bench
from tether.exact.selftest.check import Check, run_check
from tether.exact.selftest.known import FURTHER, SABOTAGES, TEN
from tether.exact.selftest.result import Caught, Outcome, SelfTest
from tether.exact.selftest.sabotage import Sabotage, replaced
from tether.observer import SilentObserver

CPU = torch.device("cpu")
CHEAP = ("KL", "β of the target controller")


def chosen(*names: str) -> tuple[Check, ...]:
    return tuple(check for check in run.CHECKS if check.name in names)


def sabotaged(*names: str) -> tuple[Sabotage, ...]:
    return tuple(one for one in SABOTAGES if one.name in names)


def run_all(device: torch.device, dtype: torch.dtype, *, sabotages=SABOTAGES) -> SelfTest:
    return run.run_selftest(device, dtype, SilentObserver(), checks=run.CHECKS, sabotages=sabotages)


def held() -> dict[tuple[str, str], int]:
    """Which object every module of tether holds under every name."""
    return {
        (module, name): id(value)
        for module, loaded in sys.modules.items()
        if module.startswith("tether.")
        for name, value in vars(loaded).items()
        if callable(value)
    }


@pytest.fixture(scope="module")
def whole():
    """One whole run in float32; it leaves the modules and the random numbers as they were."""
    before, state = held(), torch.get_rng_state()
    result = run_all(CPU, torch.float32)
    assert held() == before
    assert torch.equal(torch.get_rng_state(), state)
    return result


def test_every_check_passes_in_float32(whole):
    assert [one for one in whole.checks if not one.passed] == []
    assert whole.passed
    assert whole.defects() == []
    assert (whole.device, whole.dtype) == ("cpu", "float32")


def test_every_sabotage_is_caught_and_every_check_catches_one(whole):
    assert [one.name for one in whole.sabotage] == [one.name for one in (*TEN, *FURTHER)]
    assert len(TEN) == 10
    assert whole.missed == []
    assert whole.idle == []


@pytest.mark.parametrize(
    ("sabotage", "check"),
    [
        ("sum of per-token ratios", "clip fraction, first minibatch"),
        ("k1 in loss", "J* − J after PPO"),
        ("k3 in reward", "KL after PPO, nats"),
        ("shift by one", "log-probs of the Llama"),
        ("EOS dropped", "EOS in the mask"),
        ("padding in the mean", "change of gradient by micro-batches"),
        ("temperature on log-probs", "log-probs at temperature 0.7"),
        ("dropout on", "|ratio − 1| of the Llama"),
        ("reference swapped", "KL"),
        ("advantage shift per token", "certificate at the optimum"),
        ("sampler at another temperature", "surprisal gap at π = π_ref, s.e."),
        ("adapter subtracted again", "adapter off − base"),
    ],
)
def test_a_sabotage_is_seen_where_it_must_be(whole, sabotage, check):
    (caught,) = (one for one in whole.sabotage if one.name == sabotage)
    assert check in caught.caught_by


def test_a_mistake_is_not_seen_everywhere(whole):
    """A sabotage that broke everything would prove nothing about the checks."""
    by = {one.name: set(one.caught_by) for one in whole.sabotage}
    assert by["no clipping"] == {"clipped loss, slopes"}
    assert by["k2 without its half"] == {"k2, mean"}
    assert "|ratio − 1|, first minibatch" not in by["k3 in reward"]
    assert all(len(names) < 25 for names in by.values())


def test_training_ends_at_the_optimum_that_theory_states(whole):
    by_name = {one.name: one for one in whole.checks}
    assert by_name["KL after PPO, nats"].expected == pytest.approx(2.404318, rel=0, abs=1e-6)
    assert by_name["KL"].expected == pytest.approx(0.214830, rel=0, abs=1e-6)
    assert by_name["J* − J after PPO"].measured < 1e-3


def test_every_check_passes_in_bfloat16_with_its_own_tolerances():
    result = run_all(CPU, torch.bfloat16, sabotages=sabotaged("k1 in loss"))
    assert [one for one in result.checks if not one.passed] == []
    tolerance = {one.name: one.tolerance for one in result.checks}
    assert tolerance["|ratio − 1| of the Llama"] == 0.15
    assert "J* − J after PPO" in result.sabotage[0].caught_by


@pytest.mark.parametrize("sabotage", SABOTAGES, ids=lambda one: one.name)
def test_everything_is_put_back_also_after_an_exception(sabotage):
    before = held()
    with pytest.raises(KeyError), sabotage.switched_on():  # noqa: PT012
        assert held() != before
        raise KeyError
    assert held() == before


def test_a_sabotage_that_would_change_nothing_is_refused():
    with (
        pytest.raises(LookupError, match=r"tether\.report"),
        replaced(k1, abs, within="tether.report"),
    ):
        pass


def test_a_check_that_production_refuses_or_that_is_no_number_fails_with_the_reason():
    from tether.errors import TrainingDiverged

    def refuse(_bench: Bench) -> tuple[float, float]:
        raise TrainingDiverged("ratio gate")

    bench = Bench(device=CPU, dtype=torch.float32)
    for measure, reason in ((refuse, "ratio gate"), (lambda _: (float("nan"), 0.0), "nan")):
        check = Check(name="c", proves="", measure=measure, float32=1.0, bfloat16=1.0)
        outcome = run_check(check, bench)
        assert not outcome.passed
        assert outcome.measured is None
        assert reason in outcome.error


@pytest.fixture
def short(monkeypatch):
    """The command with two checks and two sabotages."""
    monkeypatch.setattr(run, "CHECKS", chosen(*CHEAP))
    monkeypatch.setattr(known, "SABOTAGES", sabotaged("reference swapped", "β against the error"))


def test_the_command_prints_a_table_and_one_last_line(short, capsys):
    assert main(["selftest", "--show-sabotage"]) == 0
    shown = capsys.readouterr()
    last = shown.out.splitlines()[-1]
    assert last.startswith(
        "passed: 2 of 2 checks passed, 2 of 2 sabotages caught, float32 on cpu, "
    )
    assert "reference swapped" in shown.out
    assert "checks" in shown.err


def test_the_json_document_has_the_keys_of_the_contract(short, capsys):
    assert main(["selftest", "--json", "--dtype", "bfloat16"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert {"passed", "seconds", "device", "dtype", "checks", "sabotage"} <= document.keys()
    assert (document["passed"], document["device"], document["dtype"]) == (True, "cpu", "bfloat16")
    for check in document["checks"]:
        assert {"name", "measured", "expected", "tolerance", "passed"} <= check.keys()
    assert document["sabotage"] == [
        {"name": "reference swapped", "caught_by": ["KL"]},
        {"name": "β against the error", "caught_by": ["β of the target controller"]},
    ]


def test_exit_3_where_production_is_wrong(short, capsys, monkeypatch):
    import tether.rollout

    right = tether.rollout.measure_kl

    def doubled(*args, temperature):
        return right(*args, temperature=2 * temperature)

    monkeypatch.setattr("tether.exact.selftest.bench.measure_kl", doubled)
    assert main(["selftest"]) == 3
    shown = capsys.readouterr().out
    assert "failed: KL" in shown
    assert shown.splitlines()[-1].startswith("FAILED: 1 of 2 checks passed")


def test_an_idle_check_and_a_missed_sabotage_are_defects():
    result = SelfTest(
        device="cpu", dtype="float32", seconds=1.0,
        checks=(Outcome(name="c", measured=0.0, expected=0.0, tolerance=0.0, passed=True),),
        sabotage=(Caught(name="s", caught_by=()),),
    )  # fmt: skip
    assert not result.passed
    assert result.defects() == [
        "defect: no check saw the sabotage 's'", "defect: the check 'c' saw no sabotage",
    ]  # fmt: skip


def test_cuda_where_there_is_none_and_unknown_words_are_the_users_mistake(capsys):
    if not torch.cuda.is_available():
        assert main(["selftest", "--device", "cuda"]) == 2
        assert "finds no CUDA device" in capsys.readouterr().err
    assert main(["selftest", "--dtype", "float16"]) == 2
    assert "--dtype" in capsys.readouterr().err


def test_the_page_states_every_check_with_its_tolerances_and_every_one_of_the_ten():
    page = (Path(__file__).parents[2] / "docs" / "selftest.md").read_text(encoding="utf-8")
    for check in run.CHECKS:
        name, proves = (text.replace("|", "\\|") for text in (check.name, check.proves))
        assert f"| {name} | {proves} | {check.float32:g} | {check.bfloat16:g} |\n" in page
    assert all(f"| {one.name} |" in page for one in TEN)


@pytest.mark.gpu
def test_every_check_passes_on_cuda():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    result = run_all(torch.device("cuda"), torch.float32)
    assert result.defects() == []
