"""Tests of the shell kit."""
