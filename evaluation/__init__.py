"""Benchmarks of trained models. This package runs two public harnesses, lmms-eval and lm-eval, which score them."""
