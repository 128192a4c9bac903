"""Parts of a new model, and how they are joined."""
