"""Rows of pictures and conversations: read, checked, opened, and written in a language model's chat format."""
