"""Half an hour on an accelerator: one command that measures all of it.

* `stages`: what is measured, in order of worth; `running` runs the stages, each
  in a process of its own, and writes what they find; `notes` is what a stage
  writes its figures into; `shapes` makes policies of real shapes.
* `machine`: the installation, peaks of products and copies; `kernels`: errors
  of attention; `engine`: decode, prefill, and both sides' log-probabilities;
  `steps`: train steps; `rollouts`: whole rollouts with their steps; `vectors`:
  exact search.
"""
