"""The pure core: the block pool, the block manager and sessions. No I/O, no clock, no gRPC."""
