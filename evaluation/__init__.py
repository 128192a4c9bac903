"""Benchmarks of trained models. This package runs the public harnesses lmms-eval and lm-eval, which score the models."""
