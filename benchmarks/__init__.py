"""Benchmarks. Each ends with one JSON line on standard output."""
