from octavo.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WorkerInfo(_message.Message):
    __slots__ = ("boot_id", "geometry", "model_name", "model_path", "vocab_size", "eos_token_ids", "max_inflight_steps", "attention_backend", "device", "max_num_batched_tokens", "batch_invariant", "prefill_tokens_per_s", "swap_bytes_per_s")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    GEOMETRY_FIELD_NUMBER: _ClassVar[int]
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_PATH_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_INFLIGHT_STEPS_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_BACKEND_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_BATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BATCH_INVARIANT_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    SWAP_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    boot_id: str
    geometry: _types_pb2.PoolGeometry
    model_name: str
    model_path: str
    vocab_size: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    max_inflight_steps: int
    attention_backend: str
    device: str
    max_num_batched_tokens: int
    batch_invariant: bool
    prefill_tokens_per_s: float
    swap_bytes_per_s: float
    def __init__(self, boot_id: _Optional[str] = ..., geometry: _Optional[_Union[_types_pb2.PoolGeometry, _Mapping]] = ..., model_name: _Optional[str] = ..., model_path: _Optional[str] = ..., vocab_size: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., max_inflight_steps: _Optional[int] = ..., attention_backend: _Optional[str] = ..., device: _Optional[str] = ..., max_num_batched_tokens: _Optional[int] = ..., batch_invariant: _Optional[bool] = ..., prefill_tokens_per_s: _Optional[float] = ..., swap_bytes_per_s: _Optional[float] = ...) -> None: ...

class InstallRequest(_message.Message):
    __slots__ = ("fence",)
    FENCE_FIELD_NUMBER: _ClassVar[int]
    fence: _types_pb2.Fence
    def __init__(self, fence: _Optional[_Union[_types_pb2.Fence, _Mapping]] = ...) -> None: ...

class InstallReply(_message.Message):
    __slots__ = ("worker_boot_id", "last_step_id", "retained")
    WORKER_BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    LAST_STEP_ID_FIELD_NUMBER: _ClassVar[int]
    RETAINED_FIELD_NUMBER: _ClassVar[int]
    worker_boot_id: str
    last_step_id: int
    retained: _containers.RepeatedCompositeFieldContainer[RetainedStep]
    def __init__(self, worker_boot_id: _Optional[str] = ..., last_step_id: _Optional[int] = ..., retained: _Optional[_Iterable[_Union[RetainedStep, _Mapping]]] = ...) -> None: ...

class RetainedStep(_message.Message):
    __slots__ = ("reply", "sequence_ids", "num_input_tokens", "num_computed_tokens", "num_samples")
    REPLY_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_INPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    reply: ExecuteReply
    sequence_ids: bytes
    num_input_tokens: bytes
    num_computed_tokens: bytes
    num_samples: bytes
    def __init__(self, reply: _Optional[_Union[ExecuteReply, _Mapping]] = ..., sequence_ids: _Optional[bytes] = ..., num_input_tokens: _Optional[bytes] = ..., num_computed_tokens: _Optional[bytes] = ..., num_samples: _Optional[bytes] = ...) -> None: ...

class ExecuteRequest(_message.Message):
    __slots__ = ("fence", "step_id", "traceparent", "copies", "starts", "deltas", "dropped_sequence_ids", "sequence_ids", "table_versions", "num_input_tokens", "num_computed_tokens", "input_token_ids", "num_samples", "swap_ins", "swap_outs")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    COPIES_FIELD_NUMBER: _ClassVar[int]
    STARTS_FIELD_NUMBER: _ClassVar[int]
    DELTAS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    TABLE_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_INPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    INPUT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    SWAP_INS_FIELD_NUMBER: _ClassVar[int]
    SWAP_OUTS_FIELD_NUMBER: _ClassVar[int]
    fence: _types_pb2.Fence
    step_id: int
    traceparent: str
    copies: _types_pb2.BlockCopies
    starts: _containers.RepeatedCompositeFieldContainer[SequenceStart]
    deltas: _types_pb2.TableDeltas
    dropped_sequence_ids: bytes
    sequence_ids: bytes
    table_versions: bytes
    num_input_tokens: bytes
    num_computed_tokens: bytes
    input_token_ids: bytes
    num_samples: bytes
    swap_ins: _types_pb2.BlockCopies
    swap_outs: _types_pb2.BlockCopies
    def __init__(self, fence: _Optional[_Union[_types_pb2.Fence, _Mapping]] = ..., step_id: _Optional[int] = ..., traceparent: _Optional[str] = ..., copies: _Optional[_Union[_types_pb2.BlockCopies, _Mapping]] = ..., starts: _Optional[_Iterable[_Union[SequenceStart, _Mapping]]] = ..., deltas: _Optional[_Union[_types_pb2.TableDeltas, _Mapping]] = ..., dropped_sequence_ids: _Optional[bytes] = ..., sequence_ids: _Optional[bytes] = ..., table_versions: _Optional[bytes] = ..., num_input_tokens: _Optional[bytes] = ..., num_computed_tokens: _Optional[bytes] = ..., input_token_ids: _Optional[bytes] = ..., num_samples: _Optional[bytes] = ..., swap_ins: _Optional[_Union[_types_pb2.BlockCopies, _Mapping]] = ..., swap_outs: _Optional[_Union[_types_pb2.BlockCopies, _Mapping]] = ...) -> None: ...

class SequenceStart(_message.Message):
    __slots__ = ("sequence_id", "block_ids", "table_version", "sampling", "traceparent", "request_id")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    TABLE_VERSION_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    block_ids: bytes
    table_version: int
    sampling: WorkerSampling
    traceparent: str
    request_id: str
    def __init__(self, sequence_id: _Optional[int] = ..., block_ids: _Optional[bytes] = ..., table_version: _Optional[int] = ..., sampling: _Optional[_Union[WorkerSampling, _Mapping]] = ..., traceparent: _Optional[str] = ..., request_id: _Optional[str] = ...) -> None: ...

class WorkerSampling(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "seed", "sample_index", "masked_token_ids", "masked_before_position")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    MASKED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MASKED_BEFORE_POSITION_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    sample_index: int
    masked_token_ids: _containers.RepeatedScalarFieldContainer[int]
    masked_before_position: int
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., sample_index: _Optional[int] = ..., masked_token_ids: _Optional[_Iterable[int]] = ..., masked_before_position: _Optional[int] = ...) -> None: ...

class ExecuteReply(_message.Message):
    __slots__ = ("step_id", "worker_boot_id", "sampled_token_ids", "logprobs", "timings")
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    step_id: int
    worker_boot_id: str
    sampled_token_ids: bytes
    logprobs: bytes
    timings: StepTimings
    def __init__(self, step_id: _Optional[int] = ..., worker_boot_id: _Optional[str] = ..., sampled_token_ids: _Optional[bytes] = ..., logprobs: _Optional[bytes] = ..., timings: _Optional[_Union[StepTimings, _Mapping]] = ...) -> None: ...

class StepTimings(_message.Message):
    __slots__ = ("idle_us", "prepare_us", "forward_us", "sample_us")
    IDLE_US_FIELD_NUMBER: _ClassVar[int]
    PREPARE_US_FIELD_NUMBER: _ClassVar[int]
    FORWARD_US_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_US_FIELD_NUMBER: _ClassVar[int]
    idle_us: int
    prepare_us: int
    forward_us: int
    sample_us: int
    def __init__(self, idle_us: _Optional[int] = ..., prepare_us: _Optional[int] = ..., forward_us: _Optional[int] = ..., sample_us: _Optional[int] = ...) -> None: ...
