"""Rows of pictures and conversations: reading, checking, and writing them in a language model's chat format."""
