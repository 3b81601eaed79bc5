"""One decoder for all families of `architecture`; see WORKSPACE.md."""
