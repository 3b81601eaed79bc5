"""Half an hour on an accelerator: `stages` in processes that `running` ends."""
