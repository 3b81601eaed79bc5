"""Half an hour on an accelerator; `running` has the stages and runs them."""
