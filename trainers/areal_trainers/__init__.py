"""The external FSDP2 trainer: leases trajectories, takes a decoupled-PPO step, broadcasts the weights."""

import os

# OpenMP reads this once, when torch is loaded. Its threads otherwise spin while they wait, which is the
# worst they can do on cores that engines share: with two busy processes beside it on two cores, a step of
# the small model took 17.6 s spinning and 2.6 s sleeping (50 s and 3 s on a machine that ran ten). A value given from outside stands.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
