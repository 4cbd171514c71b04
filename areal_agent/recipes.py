"""The table of recipes: published algorithms as presets of the parts in `AlgorithmConfig`.

Invariant: a preset only chooses parts; there is no code that asks for a recipe's name. What a preset does
not name keeps its default, and what the user sets wins over both. `correction` is set only where the
paper itself corrects for stale data; elsewhere the user has to choose when generation is asynchronous.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

BEGIN = "<!-- made by `python -m areal_agent.recipes docs/algorithms.md` -->"
END = "<!-- end -->"

RecipeName = Literal[
    "decoupled_grpo",
    "ppo",
    "grpo",
    "dr_grpo",
    "rloo",
    "reinforce_pp",
    "dapo",
    "gspo",
    "cispo",
    "sapo",
    "m2po",
]


@dataclass(frozen=True)
class Recipe:
    """One row.

    Attributes:
        title: what the algorithm is called.
        paper: arXiv ids, the algorithm's own first.
        where: the equation in it.
        equation: the objective that is maximised; u = π/π_prox, s = its sequence mean in log space.
        preset: part -> value, by the names of `AlgorithmConfig`.
    """

    title: str
    paper: str
    where: str
    equation: str
    preset: Mapping[str, Any] = field(default_factory=dict)


RECIPES: dict[RecipeName, Recipe] = {
    "decoupled_grpo": Recipe(
        "Decoupled PPO on GRPO advantages (AReaL)",
        "2505.24298",
        "eq. 5",
        "1/N Σ_t min(π_prox/π_behave, c) · min(u A, clip(u, 1-ε_low, 1+ε_high) A)",
        {"correction": "truncate"},
    ),
    "ppo": Recipe(
        "PPO",
        "1707.06347, 1506.02438",
        "eq. 7; GAE eq. 16",
        "1/N Σ_t min(u A, clip(u, 1-ε, 1+ε) A), A = Σ_l (γλ)^l δ_{t+l}, δ_t = r_t + γ V(s_{t+1}) - V(s_t)",
        {"advantage": "gae_token", "clip_high": 0.2},
    ),
    "grpo": Recipe(
        "GRPO",
        "2402.03300",
        "eq. 3, 4",
        "1/G Σ_i 1/|o_i| Σ_t [min(u A, clip(u, 1-ε, 1+ε) A) - β k3(π, π_ref)], A = (r - mean r) / std r",
        {"clip_high": 0.2, "averaging": "sequence", "kl": "loss", "kl_coefficient": 0.04},
    ),
    "dr_grpo": Recipe(
        "Dr. GRPO",
        "2503.20783",
        "§3.2",
        "1/(G L) Σ_i Σ_t min(u A, clip(u, 1-ε, 1+ε) A), A = r - mean r, L constant",
        {"advantage_std": False, "clip_high": 0.2, "averaging": "constant"},
    ),
    "rloo": Recipe(
        "RLOO",
        "2402.14740",
        "the RLOO estimator",
        "1/G Σ_i (R_i - mean_{j≠i} R_j) log π(o_i), R = r - β Σ_t log π/π_ref",
        {
            "advantage": "rloo",
            "advantage_std": False,
            "surrogate": "policy_gradient",
            "averaging": "constant",
            "loss_constant": 1,
            "kl": "reward",
            "kl_estimator": "k1",
            "kl_coefficient": 0.03,
        },
    ),
    "reinforce_pp": Recipe(
        "REINFORCE++",
        "2501.03262",
        "token-level KL in the reward, normalised over the batch",
        "1/N Σ_t min(u A, clip(u, 1-ε, 1+ε) A), A = normalised over the batch (r - β Σ_{i≥t} log π/π_ref)",
        {
            "advantage": "reinforce_pp",
            "clip_high": 0.2,
            "kl": "reward",
            "kl_estimator": "k1",
            "kl_coefficient": 0.01,
        },
    ),
    "dapo": Recipe(
        "DAPO",
        "2503.14476",
        "eq. 8, 13",
        "1/Σ|o_i| Σ_i Σ_t min(u A, clip(u, 1-ε_low, 1+ε_high) A), groups of equal rewards left out, "
        "r lowered by the soft overlong penalty",
        {
            "dynamic_sampling": True,
            "overlong_penalty": 1.0,
            "overlong_length": 20480,
            "overlong_buffer": 4096,
        },
    ),
    "gspo": Recipe(
        "GSPO",
        "2507.18071",
        "eq. 5, 7",
        "1/G Σ_i min(s_i A_i, clip(s_i, 1-ε_low, 1+ε_high) A_i), s_i = (π(o_i)/π_prox(o_i))^(1/|o_i|)",
        {"ratio": "sequence", "clip_low": 3e-4, "clip_high": 4e-4, "averaging": "sequence"},
    ),
    "cispo": Recipe(
        "CISPO (MiniMax-M1)",
        "2506.13585, 2510.13786",
        "eq. 4, 5",
        "1/Σ|o_i| Σ_i Σ_t sg(clip(u, 1-ε_low, 1+ε_high)) A log π(o_t); bounds as in ScaleRL: no lower, upper 5",
        {"surrogate": "cispo", "clip_low": 1.0, "clip_high": 4.0},
    ),
    "sapo": Recipe(
        "SAPO",
        "2511.20347",
        "eq. 5, 6",
        "1/G Σ_i 1/|o_i| Σ_t 4/τ σ(τ (u - 1)) A, τ = τ_pos where A > 0 else τ_neg",
        {"surrogate": "sapo", "averaging": "sequence"},
    ),
    "m2po": Recipe(
        "M2PO",
        "2510.01161",
        "algorithm 1",
        "1/Σ|o_i| Σ_i Σ_t M_t (π/π_behave) A, M_t drops the tokens of largest (log π_prox/π_behave)² until the "
        "mean of the rest is ≤ τ",
        {"surrogate": "unclipped", "correction": "second_moment"},
    ),
}


def table() -> str:
    """The recipes as a Markdown table."""
    rows = [
        "| `algorithm.recipe` | paper (arXiv) | objective, maximised | parts it sets |",
        "|---|---|---|---|",
    ]
    for name, r in RECIPES.items():
        papers = ", ".join(f"[{p}](https://arxiv.org/abs/{p})" for p in r.paper.split(", "))
        parts = ", ".join(f"`{part}={value}`" for part, value in r.preset.items())
        equation = r.equation.replace("|", "\\|")
        rows.append(f"| `{name}`: {r.title} | {papers}, {r.where} | {equation} | {parts} |")
    return "\n".join(rows) + "\n"


def write_table(document: Path) -> None:
    """Put the table between its marks in docs/algorithms.md."""
    text = document.read_text()
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    document.write_text(f"{head}{BEGIN}\n{table()}{END}{tail}")


if __name__ == "__main__":
    write_table(Path(sys.argv[1]))
