"""The settings of the loss: its named parts, which a recipe presets, and which of them go together."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from areal_agent.errors import ConfigError
from areal_agent.recipes import RECIPES, RecipeName
from areal_agent.section import Section


class AlgorithmConfig(Section):
    """The loss as named parts; `recipe` presets them, and a part that is set wins over the preset.

    The parts are orthogonal: each is read by one place of `areal_trainers/algorithm/`. Defaults are those
    of the recipe `decoupled_grpo`. See docs/algorithms.md.
    """

    recipe: RecipeName = Field(
        default="decoupled_grpo", description="published algorithm that presets the parts below"
    )
    # Advantages
    advantage: Literal["grpo", "rloo", "reinforce_pp", "gae_token", "gae_turn"] = Field(
        default="grpo",
        description="estimator: against the group's mean, the group's others, the batch, or a critic (GAE)",
    )
    advantage_std: bool = Field(
        default=True,
        description="divide by the deviation: of the group (grpo, rloo), else of the batch's tokens, centred too",
    )
    reward_normalisation: Literal["none", "batch"] = Field(
        default="none",
        description="batch: rewards centred and divided by the batch's deviation, first of all",
    )
    dynamic_sampling: bool = Field(
        default=False, description="leave groups of equal rewards out of the batch and of its mean (DAPO)"
    )
    overlong_penalty: float = Field(
        default=0.0, ge=0, description="most that a session's length lowers its reward (DAPO); 0: off"
    )
    overlong_length: int = Field(
        default=20480, gt=0, description="sampled tokens of a session from which the penalty is full"
    )
    overlong_buffer: int = Field(
        default=4096, gt=0, description="tokens before overlong_length over which the penalty grows"
    )
    # Surrogate
    surrogate: Literal["clip", "unclipped", "cispo", "sapo", "policy_gradient"] = Field(
        default="clip",
        description="what is maximised: clipped ratio, ratio, log-probability under a clipped weight, soft "
        "gate, or log-probability",
    )
    ratio: Literal["token", "sequence"] = Field(
        default="token", description="importance ratio per token, or its geometric mean per sequence (GSPO)"
    )
    clip_low: float = Field(default=0.2, gt=0, description="clip: ratio at least 1 - this")
    clip_high: float = Field(default=0.28, gt=0, description="clip: ratio at most 1 + this")
    dual_clip: float | None = Field(
        default=None, gt=1, description="gain at least this times a negative advantage; None: off"
    )
    sapo_temperature_positive: float = Field(
        default=1.0, gt=0, description="steepness of SAPO's gate where the advantage is positive"
    )
    sapo_temperature_negative: float = Field(
        default=1.05, gt=0, description="steepness of SAPO's gate elsewhere"
    )
    # Off-policy
    proximal: Literal["recompute", "loglinear", "reuse"] = Field(
        default="recompute",
        description="anchor of the ratio: one forward of the weights held, interpolation, or the behaviour policy",
    )
    correction: Literal["none", "truncate", "mask", "second_moment"] | None = Field(
        default=None,
        description="use of the behaviour weight π_prox/π_behave; None: the recipe's, where it has one",
    )
    correction_level: Literal["token", "sequence"] = Field(
        default="token", description="behaviour weight of a token, or the product over its sequence"
    )
    behaviour_weight_cap: float = Field(
        default=2.0, gt=0, description="upper bound of the behaviour weight (truncate, mask)"
    )
    behaviour_weight_floor: float = Field(
        default=0.0, ge=0, description="lower bound of the behaviour weight (truncate, mask)"
    )
    second_moment_bound: float = Field(
        default=0.04, gt=0, description="M2PO's bound on the mean squared log behaviour weight of kept tokens"
    )
    # Regularisation
    kl: Literal["none", "reward", "loss"] = Field(
        default="none", description="where the divergence from the frozen reference counts"
    )
    kl_estimator: Literal["k1", "k2", "k3"] = Field(default="k3", description="estimator of that divergence")
    kl_coefficient: float = Field(default=0.01, ge=0, description="weight of that divergence")
    reference: str = Field(
        default="", description="Hugging Face folder of the frozen reference; empty: the run's `model`"
    )
    entropy_coefficient: float = Field(default=0.0, ge=0, description="weight of the entropy bonus; 0: off")
    # Averaging
    averaging: Literal["token", "sequence", "session", "constant"] = Field(
        default="token",
        description="loss is the mean over tokens, sequences or sessions, or a sum over sessions · loss_constant",
    )
    loss_constant: int = Field(
        default=1024, gt=0, description="tokens that `averaging: constant` divides a session by (Dr. GRPO)"
    )
    # Critic (gae_token, gae_turn)
    gamma: float = Field(default=1.0, gt=0, le=1, description="discount per token or turn (GAE)")
    gae_lambda: float = Field(default=0.95, ge=0, le=1, description="λ of GAE")
    value_clip: float | None = Field(
        default=0.2, gt=0, description="a value may move this far from the old one; None: freely"
    )
    value_coefficient: float = Field(default=0.5, gt=0, description="weight of the critic's loss")
    critic_learning_rate: float = Field(default=1e-5, gt=0, description="AdamW peak rate of the critic")

    @model_validator(mode="after")
    def _apply_preset(self) -> AlgorithmConfig:
        # Not marked as set: another source of settings may still choose another recipe.
        preset = RECIPES[self.recipe].preset
        for part, info in type(self).model_fields.items():
            if part not in self.model_fields_set:
                object.__setattr__(self, part, preset.get(part, info.default))
        return self

    @property
    def needs_critic(self) -> bool:
        return self.advantage.startswith("gae")

    @property
    def needs_reference(self) -> bool:
        return self.kl != "none"

    def check(self, max_staleness: int) -> None:
        """Raise ConfigError for parts that cannot go together, or a choice that must not be left open."""
        if self.correction is None and max_staleness > 0:
            raise ConfigError(
                f"rollout.max_staleness = {max_staleness} makes generation asynchronous, and recipe "
                f"{self.recipe!r} does not say how to correct for it. Choose algorithm.correction: truncate or mask "
                "(with algorithm.correction_level token or sequence, algorithm.behaviour_weight_cap and "
                "_floor), second_moment, or none; or set rollout.max_staleness to 0"
            )
        corrects = self.correction not in (None, "none")
        if self.proximal == "reuse" and corrects:
            raise ConfigError(
                f"algorithm.proximal = reuse leaves algorithm.correction = {self.correction} nothing to act on "
                "(the behaviour weight is then 1); choose correction none, or proximal recompute"
            )
        if self.correction == "second_moment" and self.proximal != "recompute":
            raise ConfigError(
                f"algorithm.correction = second_moment chooses its tokens before the step, which algorithm.proximal "
                f"= {self.proximal} cannot tell; choose proximal recompute"
            )
        if self.behaviour_weight_floor >= self.behaviour_weight_cap:
            raise ConfigError(
                f"algorithm.behaviour_weight_floor = {self.behaviour_weight_floor:g} is not below "
                f"algorithm.behaviour_weight_cap = {self.behaviour_weight_cap:g}"
            )
        if self.overlong_penalty and self.overlong_buffer > self.overlong_length:
            raise ConfigError(
                f"algorithm.overlong_buffer = {self.overlong_buffer} is longer than algorithm.overlong_length = "
                f"{self.overlong_length}"
            )
