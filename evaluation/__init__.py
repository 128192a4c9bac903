"""Benchmarks of trained models: the public harnesses lmms-eval and lm-eval score, this package runs them."""
