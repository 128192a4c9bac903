"""Benchmarks of trained models by the public harnesses, lmms-eval and lm-eval: they score, this connects."""
