"""A small world to test in: a second shell for the cores of scheduler and memory service.

One process, virtual time, one seed. The cores are the real ones; the shells are re-done without
asyncio and gRPC (`kvmem_shell`, `worker_shell`, `scheduler_shell` with its two links), the worker
is one that checks every KV slot it touches (`worker`), and the network between them is simulated
(`network`).

What may happen on the network. gRPC is streams on connections: ordered and reliable until they
break. So a stream here delivers in order, after delays; a connection may break at any
moment, and then each message on its way was either delivered or lost, always a whole suffix,
independently in each direction, and the two ends learn of it at different times. While two
processes are cut off from each other, what they send waits; it arrives late when the cut heals in
time, and when it does not, each end gives the connection up by itself (keepalive). Reordering
exists between streams, and between streams and unary calls, never within a stream. A unary call
may lose its request, lose its reply after it was carried out, or be carried out twice.

What may happen to a process: it is killed and started again, with nothing in memory, or paused, in
which case everything sent to it and every timer of its own waits. The memory service goes on from
its journal (`journal`), unless that was deleted. It may also die in the middle of a record, which
is then lost, or after it and before its answer. Callers vanish, and come back or do not.
"""
