"""Half an hour on an accelerator: one command that measures all of it.

* `running`: the stages in order of worth; each runs in a process of its own and
  notes what it finds.
* `floors`: what a figure is compared with.
* `machine`: the installation, peaks of products and copies, attention, exact
  search, SGLang.
* `engine`: policies of real shapes, decode, prefill, and both sides'
  log-probabilities.
* `rollouts`: train steps, and whole rollouts with them.
"""
