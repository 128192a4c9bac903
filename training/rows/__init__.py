"""Rows on their way into batches."""
