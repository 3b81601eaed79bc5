"""Published question sets, and a user's own; see WORKSPACE.md."""
