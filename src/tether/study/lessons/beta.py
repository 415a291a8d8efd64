"""β: what too little and too much do, three controllers, the price of a nat, published values."""

import math

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tether.core.controllers import initial_kl_coef
from tether.exact.enumerate import entropy, sequence_logprobs
from tether.exact.frontier import most_reward
from tether.exact.languages import letters
from tether.study.ascent import Task, task_of
from tether.study.lessons.page import Column, Lesson, Table
from tether.study.lessons.published import published_table
from tether.study.lessons.style import BLUE, INK, ORANGE, VERMILLION, panels, styled
from tether.study.steering import (
    CONTROLLERS,
    NEAR,
    REGION,
    STEPS,
    TARGET,
    UPDATES,
    Bounded,
    Price,
    Run,
    bounded_run,
    price,
    reward_variance,
    run,
    solve,
)

KL_COEFS = (4.0, 2.0, 1.0, 0.5, 0.25, 0.1)
STARTS = {"too small": 0.05, "too large": 3.0}

TEXT = (
    "β says how much reward a nat of KL must bring. The first table gives the best policy of the "
    "two-letter language at each β. At 4 the policy is the reference with a little polish: the run "
    "is safe and useless. At 0.1 it is one answer, repeated: whatever the reward got wrong is now "
    "all there is. Nothing in the reward column says where to stop. The entropy and the share of "
    "the commonest answer do, and so does the KL, in a unit that means the same for every reward.",
    "β is not an arbitrary weight. It is the Lagrange multiplier of the question 'how much reward "
    "is there within a budget of KL?', so along the best policies the slope of reward against KL "
    "is β itself: the price of a nat. Lower β and the KL rises by Var(r)/β³ for each unit, with "
    "the variance taken under the best policy. The second table checks both by differencing. The "
    "KL never falls while β falls, which is why a controller that only looks at the KL can find "
    "the β of any budget. For a small budget there is a good first guess, β₀ = "
    "sd_ref(r)/√(2·target), beside the exact answer in the third table.",
    "The fourth table starts at a bad β and asks for 1 nat. A fixed β stays wrong for good: five "
    "times the budget or a fourteenth of it. The adaptive rule of 2019 has the right sign but "
    "moves β by at most 1 % a batch of 512, so a start that is too small spends everything before "
    "it acts. The target controller moves up to 22 % a step, looks ahead, brakes, and does not "
    "lower β while the KL is still climbing. Here it learns from exact gradients and exact KL, so "
    "the differences between the rules are all there is to see.",
    "A trust region is a different thing with the same unit. TRPO bounds KL(π_old‖π_new), one "
    "update against the policy before it; PPO's clipping aims at the same. In the last table but "
    "one every update stays within 0.05 nats. On the reward alone such updates walk, one harmless "
    "step after another, to the single best answer. The same updates on reward minus β times KL "
    "stop where the price says. The region bounds a step, the penalty bounds the sum of them.",
    "Published coefficients cannot be copied without the reward they belong to: multiply the "
    "reward by ten and the same policy needs ten times the β. The last table adds what each value "
    "would let a Gaussian reward of standard deviation 1 spend, 1/(2β²). For the smaller values "
    "that is more than an answer can hold: either the reward's spread was another, or it was the "
    "end of the run that set the KL, not β.",
)

FORMULA = """max E[r] subject to KL(π‖π_ref) ≤ κ      π* ∝ π_ref · exp(r/β)
dR*/dKL = β        dKL/dβ = −Var_π*(r)/β³        β₀ = sd_ref(r)/√(2κ)
adaptive:  β ← β (1 + clip(KL/κ − 1, ±0.2) · batch/horizon)
target:    log β ← log β + rate · clip((KL + 4·change)/κ − 1, ±1), held while the KL climbs
TRPO:      KL(π_old‖π_new) ≤ δ for each update"""

REMEMBER = (
    "β is the price of a nat: at the optimum one more nat brings β more reward.",
    "Set the KL, in nats per response, and let a controller find β; a β has no meaning without its "
    "reward scale.",
    "A controller must be quick against overspending and must not wind up while the KL still "
    "climbs.",
    "A trust region bounds one update against the last policy; only the penalty knows the "
    "reference.",
)


def sizes_table(task: Task) -> Table:
    """Too large, right, too small: the optimum at each β."""
    rows = []
    for kl_coef in (math.inf, *KL_COEFS):
        free = math.isinf(kl_coef)
        policy = task.reference if free else solve(task, kl_coef).policy
        likeliest = sequence_logprobs(policy, task.tree).exp().max().item()
        rows.append((
            "∞ (reference)" if free else kl_coef, task.reward(policy), task.kl(policy),
            entropy(policy, task.tree).item(), likeliest,
        ))  # fmt: skip
    return Table(
        caption="The best policy at each β",
        columns=(
            Column(name="β", format="g"), Column(name="reward", format=".4f"),
            Column(name="KL, nats", format=".4f"), Column(name="entropy, nats", format=".3f"),
            Column(name="commonest answer", format=".1%"),
        ),
        rows=tuple(rows),
    )  # fmt: skip


def price_table(prices: list[Price]) -> Table:
    """The multiplier identities, checked."""
    return Table(
        caption="β is the price of a nat: central differences beside the formulas",
        columns=(
            Column(name="β", format="g"), Column(name="KL, nats", format=".4f"),
            Column(name="dR*/dKL", format=".6f"), Column(name="dKL/dβ", format=".5f"),
            Column(name="−Var(r)/β³", format=".5f"),
        ),
        rows=tuple((p.kl_coef, p.kl, p.reward_per_nat, p.kl_per_coef, p.formula) for p in prices),
    )  # fmt: skip


def controllers_table(runs: dict[str, dict[str, Run]]) -> Table:
    """Three rules from two bad starts."""
    rows = []
    for start, by_rule in runs.items():
        for rule, found in by_rule.items():
            settled = "never" if found.settled is None else str(found.settled)
            rows.append((
                f"{start}, {STARTS[start]:g}", rule, max(found.kl), found.kl[-1],
                found.kl_coef[-1], settled,
            ))  # fmt: skip
    return Table(
        caption=f"Target {TARGET:g} nat per response, {STEPS} steps",
        columns=(
            Column(name="first β"), Column(name="controller"),
            Column(name="highest KL", format=".3f"), Column(name="last KL", format=".3f"),
            Column(name="last β", format=".4f"),
            Column(name=f"within {NEAR:.0%} from step"),
        ),
        rows=tuple(rows),
    )  # fmt: skip


def region_table(free: Bounded, held: Bounded, kl_coef: float) -> Table:
    """What a trust region bounds, and what the penalty does."""
    return Table(
        caption=f"{UPDATES} updates of at most {REGION:g} nats each",
        columns=(
            Column(name="objective"), Column(name="largest KL(π_old‖π_new), nats", format=".4f"),
            Column(name="KL(π‖π_ref) after 10, nats", format=".3f"),
            Column(name=f"after {UPDATES}, nats", format=".3f"),
        ),
        rows=tuple(
            (name, max(b.per_update), b.from_reference[9], b.from_reference[-1])
            for name, b in (("reward alone", free), (f"reward − {kl_coef:.3f} · KL", held))
        ),
    )  # fmt: skip


def start_table(task: Task) -> Table:
    """The rule for a first β beside the β that meets the budget."""
    spread = reward_variance(task, task.reference) ** 0.5
    rows = []
    for budget in (0.05, 0.2, TARGET, 2.0):
        exact = most_reward(lambda b: solve(task, b).point, budget).kl_coef
        rows.append((budget, initial_kl_coef(spread, budget), exact))
    return Table(
        caption="First guess of β for a budget",
        columns=(
            Column(name="KL target, nats", format="g"),
            Column(name="sd_ref(r)/√(2·target)", format=".4f"),
            Column(name="β that meets it", format=".4f"),
        ),
        rows=tuple(rows),
    )  # fmt: skip


def _row(axes: tuple[Axes, Axes], by_rule: dict[str, Run], title: str) -> None:
    """KL and β of three rules from one start."""
    looks = {"fixed": (ORANGE, ":"), "adaptive": (VERMILLION, "--"), "target": (BLUE, "-")}
    steps = range(1, STEPS + 1)
    for rule, found in by_rule.items():
        color, dash = looks[rule]
        axes[0].plot(steps, found.kl, dash, color=color, label=rule)
        axes[1].plot(steps, found.kl_coef, dash, color=color, label=rule)
    axes[0].axhline(TARGET, color=INK, linewidth=0.9)
    axes[0].set(title=f"{title}: KL", ylabel="nats per response", xlabel="step")
    axes[1].set(title="… and β", ylabel="reward per nat", yscale="log", xlabel="step")


@styled
def draw(runs: dict[str, dict[str, Run]], best: float) -> Figure:
    """KL and β against the step, from a β too small and one too large."""
    figure, axes = panels(4, width=11.5, height=3.3)
    for i, (start, by_rule) in enumerate(runs.items()):
        pair = (axes[2 * i], axes[2 * i + 1])
        _row(pair, by_rule, f"First β {start}")
        pair[1].axhline(best, color=INK, linewidth=0.9)
        pair[1].set_ylim(0.03, 5)
        pair[1].set_yticks([0.05, 0.2, 1, 3], ["0.05", "0.2", "1", "3"])
        pair[1].minorticks_off()
    axes[0].legend(loc="center right")
    axes[2].set_ylim(0, 1.25)
    return figure


def lesson() -> Lesson:
    """Solve, difference, steer."""
    task = task_of(letters())
    best = most_reward(lambda b: solve(task, b).point, TARGET).kl_coef
    runs = {
        start: {rule: run(task, step, first) for rule, step in CONTROLLERS.items()}
        for start, first in STARTS.items()
    }
    return Lesson(
        name="beta",
        title="β is the price of a nat; choose the nats, not the price",
        text=TEXT,
        formula=FORMULA,
        tables=(
            sizes_table(task),
            price_table([price(task, kl_coef) for kl_coef in KL_COEFS[:-1]]),
            start_table(task),
            controllers_table(runs),
            region_table(bounded_run(task, 0.0), bounded_run(task, best), best),
            published_table(),
        ),
        figure=draw(runs, best),
        figure_caption="KL per response and β at each step for a fixed β, the adaptive rule and "
        "the target controller, from a first β that is too small and from one that is too large; "
        "the "
        f"thin line is the target of {TARGET:g} nat and the β that meets it.",
        remember=REMEMBER,
    )
