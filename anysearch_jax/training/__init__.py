"""Training: rollouts, rewards, steps, checkpoints.

* `loop` runs one training. `learner` and `train_step` take its optimizer steps;
  `ppo` adds a critic.
* `collection`, `sampler`, `pipeline` sample rollouts, also ahead of training.
* `rewards_and_advantages`, `batching`, `logprobs`: episodes to arrays.
* `checkpoint` saves, and finds damage; `loop` resumes.
* `health`, `metrics`, `timeline`, `throughput`: monitoring.
* `validation` refuses configurations that cannot run.
"""
