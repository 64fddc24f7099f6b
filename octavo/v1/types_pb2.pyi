from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_ABORT: _ClassVar[FinishReason]
    FINISH_REASON_KV_CAPACITY: _ClassVar[FinishReason]
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_ABORT: FinishReason
FINISH_REASON_KV_CAPACITY: FinishReason

class Fence(_message.Message):
    __slots__ = ("session_id", "epoch", "kvmem_boot_id", "worker_boot_id")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    KVMEM_BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    epoch: int
    kvmem_boot_id: str
    worker_boot_id: str
    def __init__(self, session_id: _Optional[str] = ..., epoch: _Optional[int] = ..., kvmem_boot_id: _Optional[str] = ..., worker_boot_id: _Optional[str] = ...) -> None: ...

class PoolGeometry(_message.Message):
    __slots__ = ("num_blocks", "block_size", "max_model_len", "kv_bytes_per_block", "kv_dtype", "num_host_blocks")
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_PER_BLOCK_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    NUM_HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    block_size: int
    max_model_len: int
    kv_bytes_per_block: int
    kv_dtype: str
    num_host_blocks: int
    def __init__(self, num_blocks: _Optional[int] = ..., block_size: _Optional[int] = ..., max_model_len: _Optional[int] = ..., kv_bytes_per_block: _Optional[int] = ..., kv_dtype: _Optional[str] = ..., num_host_blocks: _Optional[int] = ...) -> None: ...

class PoolLevels(_message.Message):
    __slots__ = ("num_free_blocks", "num_cached_blocks", "num_in_use_blocks", "num_quarantined_blocks", "num_reserved_blocks", "num_free_sequences", "num_free_host_blocks")
    NUM_FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_IN_USE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_QUARANTINED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_RESERVED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_free_blocks: int
    num_cached_blocks: int
    num_in_use_blocks: int
    num_quarantined_blocks: int
    num_reserved_blocks: int
    num_free_sequences: int
    num_free_host_blocks: int
    def __init__(self, num_free_blocks: _Optional[int] = ..., num_cached_blocks: _Optional[int] = ..., num_in_use_blocks: _Optional[int] = ..., num_quarantined_blocks: _Optional[int] = ..., num_reserved_blocks: _Optional[int] = ..., num_free_sequences: _Optional[int] = ..., num_free_host_blocks: _Optional[int] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "seed", "n", "first_sample_index", "max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    FIRST_SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    n: int
    first_sample_index: int
    max_tokens: int
    min_tokens: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., n: _Optional[int] = ..., first_sample_index: _Optional[int] = ..., max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ...) -> None: ...

class RequestSpec(_message.Message):
    __slots__ = ("params", "attach_secret_digest", "detach_ttl_ms", "traceparent", "priority")
    PARAMS_FIELD_NUMBER: _ClassVar[int]
    ATTACH_SECRET_DIGEST_FIELD_NUMBER: _ClassVar[int]
    DETACH_TTL_MS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    params: SamplingParams
    attach_secret_digest: bytes
    detach_ttl_ms: int
    traceparent: str
    priority: int
    def __init__(self, params: _Optional[_Union[SamplingParams, _Mapping]] = ..., attach_secret_digest: _Optional[bytes] = ..., detach_ttl_ms: _Optional[int] = ..., traceparent: _Optional[str] = ..., priority: _Optional[int] = ...) -> None: ...

class TableDeltas(_message.Message):
    __slots__ = ("sequence_ids", "table_indices", "block_ids", "table_versions")
    SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    TABLE_INDICES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    TABLE_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    sequence_ids: bytes
    table_indices: bytes
    block_ids: bytes
    table_versions: bytes
    def __init__(self, sequence_ids: _Optional[bytes] = ..., table_indices: _Optional[bytes] = ..., block_ids: _Optional[bytes] = ..., table_versions: _Optional[bytes] = ...) -> None: ...

class BlockCopies(_message.Message):
    __slots__ = ("src_block_ids", "dst_block_ids")
    SRC_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    DST_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    src_block_ids: bytes
    dst_block_ids: bytes
    def __init__(self, src_block_ids: _Optional[bytes] = ..., dst_block_ids: _Optional[bytes] = ...) -> None: ...
