"""Every recipe against an implementation of its own, from the papers, in float64 numpy.

The oracle reads no setting and no preset: constants are written out. It works on whole batches by plain
loops, and differentiates by the complex step (Im f(x + ih) / h, exact to rounding), so it shares neither
code nor method with what it checks.
"""

from __future__ import annotations

import cmath
from collections.abc import Callable, Iterable

import numpy as np
import pytest
from algorithm_kit import VERSION, Row, loss_and_gradient, make_rows, rows
from hypothesis import given, settings

from areal_agent.config import AlgorithmConfig
from areal_agent.recipes import RECIPES

Logps = list[list[complex]]
Loss = Callable[[list[Row], Logps], complex]
H = 1e-30


def smaller(a: complex, b: complex) -> complex:
    return a if a.real <= b.real else b


def clip(x: complex, low: float, high: float) -> complex:
    return low if x.real < low else high if x.real > high else x


def trained(all_rows: list[Row]) -> list[Row]:
    return [r for r in all_rows if r.reward is not None and r.n]


def rewards_of_group(all_rows: list[Row], group: str, but: str | None = None) -> list[float]:
    known = {r.session: r.reward for r in all_rows if r.group == group and r.reward is not None}
    return [reward for session, reward in known.items() if session != but]


def against_group(all_rows: list[Row], row: Row, std: bool = True) -> float:
    peers = rewards_of_group(all_rows, row.group)
    if len(set(peers)) == 1:
        return 0.0
    centred = row.reward - np.mean(peers)  # type: ignore[operator]
    return float(centred / (np.std(peers) + 1e-6) if std else centred)


def token_mean(terms: Iterable[list[complex]]) -> complex:
    flat = [x for term in terms for x in term]
    return sum(flat) / len(flat) if flat else 0.0


def sequence_mean(terms: Iterable[list[complex]]) -> complex:
    means = [sum(term) / len(term) for term in terms]
    return sum(means) / len(means)


def ppo_term(x: complex, anchor: float, a: float, low: float, high: float) -> complex:
    u = cmath.exp(x - anchor)
    return smaller(u * a, clip(u, 1 - low, 1 + high) * a)


def whitened(columns: list[list[float]]) -> list[list[float]]:
    flat = np.array([a for column in columns for a in column])
    if len(set(flat.tolist())) == 1:
        return [[0.0] * len(c) for c in columns]
    return [[float((a - flat.mean()) / (flat.std() + 1e-6)) for a in column] for column in columns]


def decoupled_grpo(all_rows: list[Row], logps: Logps) -> complex:
    return -token_mean(
        [
            min(np.exp(row.prox[t] - row.behave[t]), 2.0)
            * ppo_term(x[t], row.prox[t], against_group(all_rows, row), 0.2, 0.28)
            for t in range(row.n)
        ]
        for row, x in zip(trained(all_rows), logps, strict=True)
    )


def by_definition(
    reward: float, penalties: list[float], values: list[float], γ: float, λ: float
) -> list[float]:
    """GAE as the double sum of the paper."""
    n = len(values)
    nexts = [*values[1:], 0.0]
    δ = [(reward if k == n - 1 else 0.0) - penalties[k] + γ * nexts[k] - values[k] for k in range(n)]
    return [sum((γ * λ) ** (k - t) * δ[k] for k in range(t, n)) for t in range(n)]


def ppo(all_rows: list[Row], logps: Logps) -> complex:
    kept = trained(all_rows)
    raw = [by_definition(r.reward or 0.0, [0.0] * r.n, list(r.value), 1.0, 0.95) for r in kept]
    return -token_mean(
        [ppo_term(x[t], row.prox[t], a[t], 0.2, 0.2) for t in range(row.n)]
        for row, x, a in zip(kept, logps, whitened(raw), strict=True)
    )


def ppo_turns(all_rows: list[Row], logps: Logps) -> complex:
    """γ 0.9, λ 0.8, no whitening; KL k2 at 0.2 in the reward."""
    terms = []
    for row, x in zip(trained(all_rows), logps, strict=True):
        kl = [0.2 * 0.5 * (row.prox[t] - row.ref[t]) ** 2 for t in range(row.n)]
        turns = sorted(set(row.turns.tolist()))
        members = [[t for t in range(row.n) if row.turns[t] == turn] for turn in turns]
        advantages = by_definition(
            row.reward or 0.0,
            [sum(kl[t] for t in m) for m in members],
            [row.value[m[0]] for m in members],
            0.9,
            0.8,
        )
        of = {t: a for m, a in zip(members, advantages, strict=True) for t in m}
        terms.append([ppo_term(x[t], row.prox[t], of[t], 0.2, 0.2) for t in range(row.n)])
    return -token_mean(terms)


def grpo(all_rows: list[Row], logps: Logps) -> complex:
    def term(row: Row, t: int, x: complex) -> complex:
        r = cmath.exp(row.ref[t] - x)
        return ppo_term(x, row.prox[t], against_group(all_rows, row), 0.2, 0.2) - 0.04 * (
            r - (row.ref[t] - x) - 1
        )

    return -sequence_mean(
        [term(row, t, x[t]) for t in range(row.n)] for row, x in zip(trained(all_rows), logps, strict=True)
    )


def dr_grpo(all_rows: list[Row], logps: Logps) -> complex:
    kept = trained(all_rows)
    total = sum(
        ppo_term(x[t], row.prox[t], against_group(all_rows, row, std=False), 0.2, 0.2)
        for row, x in zip(kept, logps, strict=True)
        for t in range(row.n)
    )
    return -total / (len({r.session for r in kept}) * 1024)


def rloo(all_rows: list[Row], logps: Logps) -> complex:
    kept = trained(all_rows)
    kl: dict[str, float] = {}
    for row in kept:
        kl[row.session] = kl.get(row.session, 0.0) + 0.03 * float(np.sum(row.prox - row.ref))
    penalised = {
        r.session: (r.group, r.reward - kl.get(r.session, 0.0)) for r in all_rows if r.reward is not None
    }
    total: complex = 0.0
    for row, x in zip(kept, logps, strict=True):
        group, mine = penalised[row.session]
        others = [v for s, (g, v) in penalised.items() if g == group and s != row.session]
        total += (mine - np.mean(others) if others else 0.0) * sum(x)
    return -total / len({r.session for r in kept})


def reinforce_pp(all_rows: list[Row], logps: Logps) -> complex:
    kept = trained(all_rows)
    raw = [
        [r.reward - 0.01 * float(np.sum((r.prox - r.ref)[t:])) for t in range(r.n)]  # type: ignore[operator]
        for r in kept
    ]
    return -token_mean(
        [ppo_term(x[t], row.prox[t], a[t], 0.2, 0.2) for t in range(row.n)]
        for row, x, a in zip(kept, logps, whitened(raw), strict=True)
    )


def dapo(all_rows: list[Row], logps: Logps) -> complex:
    """The kit's sessions are far shorter than DAPO's penalised lengths; see `short_dapo`."""
    return -token_mean(
        [ppo_term(x[t], row.prox[t], against_group(all_rows, row), 0.2, 0.28) for t in range(row.n)]
        for row, x in zip(varied(all_rows), logps, strict=True)
    )


def varied(all_rows: list[Row]) -> list[Row]:
    return [r for r in trained(all_rows) if len(set(rewards_of_group(all_rows, r.group))) > 1]


def short_dapo(all_rows: list[Row], logps: Logps) -> complex:
    """As dapo, L_max 8, L_cache 4, penalty 0.5."""
    shaped: dict[str, tuple[str, float]] = {}
    for row in all_rows:
        if row.reward is not None:
            y = sum(r.n for r in all_rows if r.session == row.session)
            penalty = 0.0 if y <= 4 else -1.0 if y > 8 else (4 - y) / 4
            shaped[row.session] = (row.group, row.reward + 0.5 * penalty)
    terms = []
    for row, x in zip(varied(all_rows), logps, strict=True):
        peers = [v for g, v in shaped.values() if g == row.group]
        same = len(set(peers)) == 1
        a = 0.0 if same else (shaped[row.session][1] - np.mean(peers)) / (np.std(peers) + 1e-6)
        terms.append([ppo_term(x[t], row.prox[t], float(a), 0.2, 0.28) for t in range(row.n)])
    return -token_mean(terms)


def gspo(all_rows: list[Row], logps: Logps, low: float = 3e-4, high: float = 4e-4) -> complex:
    kept = trained(all_rows)
    total: complex = 0.0
    for row, x in zip(kept, logps, strict=True):
        s = cmath.exp(sum(x[t] - row.prox[t] for t in range(row.n)) / row.n)
        a = against_group(all_rows, row)
        total += smaller(s * a, clip(s, 1 - low, 1 + high) * a)
    return -total / len(kept)


def cispo(all_rows: list[Row], logps: Logps) -> complex:
    return -token_mean(
        [
            min(np.exp(x[t].real - row.prox[t]), 5.0) * against_group(all_rows, row) * x[t]
            for t in range(row.n)
        ]
        for row, x in zip(trained(all_rows), logps, strict=True)
    )


def sapo(all_rows: list[Row], logps: Logps) -> complex:
    def term(row: Row, t: int, x: complex) -> complex:
        a = against_group(all_rows, row)
        τ = 1.0 if a > 0 else 1.05
        return 4 / τ / (1 + cmath.exp(-τ * (cmath.exp(x - row.prox[t]) - 1))) * a

    return -sequence_mean(
        [term(row, t, x[t]) for t in range(row.n)] for row, x in zip(trained(all_rows), logps, strict=True)
    )


def m2po(all_rows: list[Row], logps: Logps) -> complex:
    kept = trained(all_rows)
    moments = sorted(
        (((row.prox[t] - row.behave[t]) ** 2, i, t) for i, row in enumerate(kept) for t in range(row.n)),
        reverse=True,
    )
    while len(moments) > 1 and np.mean([m for m, _, _ in moments]) > 0.04:
        moments.pop(0)
    stays = {(i, t) for _, i, t in moments}
    return -token_mean(
        [
            cmath.exp(x[t] - row.behave[t]) * against_group(all_rows, row) if (i, t) in stays else 0.0
            for t in range(row.n)
        ]
        for i, (row, x) in enumerate(zip(kept, logps, strict=True))
    )


ORACLES: dict[str, Loss] = {
    "decoupled_grpo": decoupled_grpo,
    "ppo": ppo,
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce_pp": reinforce_pp,
    "dapo": dapo,
    "gspo": gspo,
    "cispo": cispo,
    "sapo": sapo,
    "m2po": m2po,
}


def loglinear(all_rows: list[Row], logps: Logps) -> complex:
    """The anchor is between behaviour and current policy; it takes no gradient."""
    terms = []
    for row, x in zip(trained(all_rows), logps, strict=True):
        a = against_group(all_rows, row)
        term = []
        for t in range(row.n):
            v_prox, v_now = VERSION, VERSION + 1
            α = (v_prox - row.versions[t]) / (v_now - row.versions[t])
            prox = row.behave[t] + α * (x[t].real - row.behave[t])
            term.append(min(np.exp(prox - row.behave[t]), 2.0) * ppo_term(x[t], prox, a, 0.2, 0.28))
        terms.append(term)
    return -token_mean(terms)


def reuse(all_rows: list[Row], logps: Logps) -> complex:
    return -token_mean(
        [ppo_term(x[t], row.behave[t], against_group(all_rows, row), 0.2, 0.28) for t in range(row.n)]
        for row, x in zip(trained(all_rows), logps, strict=True)
    )


def masked_sequences(all_rows: list[Row], logps: Logps) -> complex:
    """A sequence whose whole weight is outside [0.7, 1.6] trains nothing, and still counts in the mean."""
    terms = []
    for row, x in zip(trained(all_rows), logps, strict=True):
        w = np.exp(np.sum(row.prox - row.behave))
        w = w if 0.7 <= w <= 1.6 else 0.0
        a = against_group(all_rows, row)
        terms.append([w * ppo_term(x[t], row.prox[t], a, 0.2, 0.28) for t in range(row.n)])
    return -token_mean(terms)


def truncated_sessions(all_rows: list[Row], logps: Logps) -> complex:
    """Weights brought into [0.9, 1.1]; mean over sessions; KL k2 at 0.3; dual clip at 1.1."""
    of_session: dict[str, list[complex]] = {}
    for row, x in zip(trained(all_rows), logps, strict=True):
        a = against_group(all_rows, row)
        for t in range(row.n):
            w = float(np.clip(np.exp(row.prox[t] - row.behave[t]), 0.9, 1.1))
            gain = ppo_term(x[t], row.prox[t], a, 0.2, 0.28)
            if a < 0 and gain.real < 1.1 * a:
                gain = 1.1 * a
            of_session.setdefault(row.session, []).append(w * gain - 0.3 * (x[t] - row.ref[t]) ** 2 / 2)
    return -sequence_mean(of_session.values())


def k1_and_batch_rewards(all_rows: list[Row], logps: Logps) -> complex:
    """Rewards normalised over the batch and compared with the group's others; KL k1 at 0.1 in the loss."""
    known = {r.session: (r.group, r.reward) for r in all_rows if r.reward is not None}
    all_rewards = [reward for _, reward in known.values()]
    mean, std = np.mean(all_rewards), np.std(all_rewards) + 1e-6
    terms = []
    for row, x in zip(trained(all_rows), logps, strict=True):
        others = [(r - mean) / std for s, (g, r) in known.items() if g == row.group and s != row.session]
        a = float((row.reward - mean) / std - np.mean(others)) if others else 0.0  # type: ignore[operator]
        a = 0.0 if len(set(rewards_of_group(all_rows, row.group))) == 1 else a
        terms.append(
            [ppo_term(x[t], row.prox[t], a, 0.2, 0.28) - 0.1 * (x[t] - row.ref[t]) for t in range(row.n)]
        )
    return -token_mean(terms)


VARIANTS: dict[str, tuple[dict, Loss]] = {
    "GAE over turns, KL in the reward": (
        dict(
            recipe="ppo",
            advantage="gae_turn",
            gamma=0.9,
            gae_lambda=0.8,
            advantage_std=False,
            kl="reward",
            kl_estimator="k2",
            kl_coefficient=0.2,
        ),
        ppo_turns,
    ),
    "GSPO with wide bounds": (
        dict(recipe="gspo", clip_low=0.1, clip_high=0.15),
        lambda all_rows, logps: gspo(all_rows, logps, 0.1, 0.15),
    ),
    "overlong penalty": (
        dict(recipe="dapo", overlong_penalty=0.5, overlong_length=8, overlong_buffer=4),
        short_dapo,
    ),
    "loglinear": (dict(proximal="loglinear"), loglinear),
    "reuse": (dict(proximal="reuse", correction="none"), reuse),
    "mask, sequence": (
        dict(
            correction="mask",
            correction_level="sequence",
            behaviour_weight_floor=0.7,
            behaviour_weight_cap=1.6,
        ),
        masked_sequences,
    ),
    "both bounds, per session, k2, dual clip": (
        dict(
            behaviour_weight_floor=0.9,
            behaviour_weight_cap=1.1,
            averaging="session",
            kl="loss",
            kl_estimator="k2",
            kl_coefficient=0.3,
            dual_clip=1.1,
        ),
        truncated_sessions,
    ),
    "k1, normalised rewards": (
        dict(
            advantage="rloo",
            advantage_std=False,
            reward_normalisation="batch",
            correction="none",
            kl="loss",
            kl_estimator="k1",
            kl_coefficient=0.1,
        ),
        k1_and_batch_rewards,
    ),
}


def agree(algorithm: AlgorithmConfig, oracle: Loss, all_rows: list[Row]) -> None:
    loss, gradient, _, kept = loss_and_gradient(algorithm, all_rows)
    points: Logps = [[complex(v) for v in row.logp] for row in kept]
    wanted = []
    for row in points:
        for t in range(len(row)):
            row[t] += H * 1j
            wanted.append(complex(oracle(all_rows, points)).imag / H)
            row[t] = complex(row[t].real)
    assert loss == pytest.approx(complex(oracle(all_rows, points)).real, rel=1e-10, abs=1e-12)
    scale = max(map(abs, wanted), default=0.0)
    np.testing.assert_allclose(gradient, wanted, rtol=1e-10, atol=1e-10 * scale)


def test_there_is_an_oracle_for_every_recipe() -> None:
    assert ORACLES.keys() == RECIPES.keys()


@pytest.mark.parametrize("name", RECIPES)
@settings(deadline=None, max_examples=20)
@given(rows())
def test_recipe(name: str, all_rows: list[Row]) -> None:
    algorithm = AlgorithmConfig.model_validate({"recipe": name})
    agree(algorithm, ORACLES[name], all_rows)


@pytest.mark.parametrize("name", VARIANTS)
@settings(deadline=None, max_examples=20)
@given(rows())
def test_part(name: str, all_rows: list[Row]) -> None:
    options, oracle = VARIANTS[name]
    agree(AlgorithmConfig.model_validate(options), oracle, all_rows)


@pytest.mark.parametrize("name", RECIPES)
def test_another_recipe_disagrees(name: str) -> None:
    """The comparison can fail: no recipe passes for the one listed before it."""
    groups = [[(1.0, [3, 2]), (0.0, [4]), (0.5, [6])], [(1.0, [5]), (1.0, [2])]]
    all_rows = make_rows(groups, np.random.default_rng(0))  # type: ignore[arg-type]
    names = list(RECIPES)
    algorithm = AlgorithmConfig.model_validate({"recipe": name})
    agree(algorithm, ORACLES[name], all_rows)
    with pytest.raises((AssertionError, ValueError)):
        agree(algorithm, ORACLES[names[names.index(name) - 1]], all_rows)


def test_the_entropy_bonus_raises_entropy_by_its_coefficient() -> None:
    all_rows = make_rows([[(1.0, [3, 2]), (0.0, [5])]], np.random.default_rng(0))
    algorithm = AlgorithmConfig(entropy_coefficient=0.25)
    loss, _, by_entropy, kept = loss_and_gradient(algorithm, all_rows)
    plain = loss_and_gradient(AlgorithmConfig(), all_rows)[0]
    assert loss - plain == pytest.approx(-0.25 * np.mean(np.concatenate([r.entropy for r in kept])))
    assert by_entropy == pytest.approx(np.full(10, -0.025))
