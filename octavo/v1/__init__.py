"""Generated from `proto/octavo/v1` by `tools/gen_protos.py`. Do not edit."""
