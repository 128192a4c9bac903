"""Scores trained models on benchmarks, with two public harnesses: lmms-eval and lm-eval."""
