"""How much each token counts in the loss: loss = Σ_t weight_t ℓ_t / Σ_t share_t.

    averaging   weight_t                    share_t                     the loss is
    token       1                           1                           a mean over tokens (DAPO)
    sequence    1 / tokens of its sequence  1 / tokens of its sequence  a mean over sequences (GRPO)
    session     1 / tokens of its session   1 / tokens of its session   a mean over sessions
    constant    1                           L / tokens of its session   a sum ÷ (sessions · L) (Dr. GRPO)

Both are fixed for the whole batch before it is cut, so a part of it (a micro-batch, a rank) sums its own
and the quotient of the sums is the batch's. Of a session that branched into 3 sequences, `session` gives the
three together the weight of one session that did not; `sequence` gives it three. Sessions without a reward,
and groups that dynamic sampling left out, count in no share.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np


def weights_and_shares(
    averaging: str, lengths: Sequence[int], sessions: Sequence[str], constant: int
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Per sequence ([n] weight, [n] share). lengths: trained tokens n; sessions: whose sequence it is."""
    of_session: Counter[str] = Counter()
    for n, session in zip(lengths, sessions, strict=True):
        of_session[session] += n
    out = []
    for n, session in zip(lengths, sessions, strict=True):
        weight, share = {
            "token": (1.0, 1.0),
            "sequence": (1.0 / n, 1.0 / n),
            "session": (1.0 / of_session[session], 1.0 / of_session[session]),
            "constant": (1.0, constant / of_session[session]),
        }[averaging]
        out.append((np.full(n, weight), np.full(n, share)))
    return out
