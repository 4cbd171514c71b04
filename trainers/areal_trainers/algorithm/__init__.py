"""What is optimised, one part a file; `areal_agent.config.AlgorithmConfig` chooses among the parts.

Rewards of sessions become advantages of tokens (rewards, advantages, gae), tokens get their share in the
mean (averaging), and the loss composes surrogate, correction and KL (loss). `experience` puts the numbers
that are fixed before the first update into the items' columns, over the WHOLE batch, so that the loss needs
nothing but a micro-batch of whole sequences.
"""
