"""Composing a NormLlava and training it in two stages with TRL."""
