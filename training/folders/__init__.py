"""The folders of a run: its record, its checkpoints, and the model that it starts from."""
