"""The external FSDP2 trainer: leases trajectories, takes a decoupled-PPO step, broadcasts the weights."""
