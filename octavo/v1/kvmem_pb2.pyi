from octavo.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class OpStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OP_STATUS_UNSPECIFIED: _ClassVar[OpStatus]
    OP_STATUS_OK: _ClassVar[OpStatus]
    OP_STATUS_NO_FREE_BLOCKS: _ClassVar[OpStatus]
    OP_STATUS_NO_FREE_SEQUENCES: _ClassVar[OpStatus]
    OP_STATUS_ALREADY_EXISTS: _ClassVar[OpStatus]
    OP_STATUS_UNKNOWN_SEQUENCE: _ClassVar[OpStatus]
    OP_STATUS_UNKNOWN_REQUEST: _ClassVar[OpStatus]
    OP_STATUS_INVALID_STATE: _ClassVar[OpStatus]
    OP_STATUS_INVALID_ARGUMENT: _ClassVar[OpStatus]
    OP_STATUS_TENANT_QUOTA: _ClassVar[OpStatus]
    OP_STATUS_NO_FREE_HOST_BLOCKS: _ClassVar[OpStatus]

class SequenceStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SEQUENCE_STATUS_UNSPECIFIED: _ClassVar[SequenceStatus]
    SEQUENCE_STATUS_WAITING: _ClassVar[SequenceStatus]
    SEQUENCE_STATUS_RUNNING: _ClassVar[SequenceStatus]
    SEQUENCE_STATUS_FINISHED: _ClassVar[SequenceStatus]
    SEQUENCE_STATUS_SWAPPED: _ClassVar[SequenceStatus]
OP_STATUS_UNSPECIFIED: OpStatus
OP_STATUS_OK: OpStatus
OP_STATUS_NO_FREE_BLOCKS: OpStatus
OP_STATUS_NO_FREE_SEQUENCES: OpStatus
OP_STATUS_ALREADY_EXISTS: OpStatus
OP_STATUS_UNKNOWN_SEQUENCE: OpStatus
OP_STATUS_UNKNOWN_REQUEST: OpStatus
OP_STATUS_INVALID_STATE: OpStatus
OP_STATUS_INVALID_ARGUMENT: OpStatus
OP_STATUS_TENANT_QUOTA: OpStatus
OP_STATUS_NO_FREE_HOST_BLOCKS: OpStatus
SEQUENCE_STATUS_UNSPECIFIED: SequenceStatus
SEQUENCE_STATUS_WAITING: SequenceStatus
SEQUENCE_STATUS_RUNNING: SequenceStatus
SEQUENCE_STATUS_FINISHED: SequenceStatus
SEQUENCE_STATUS_SWAPPED: SequenceStatus

class SessionRequest(_message.Message):
    __slots__ = ("open", "batch", "heartbeat")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    open: OpenSessionRequest
    batch: Batch
    heartbeat: Heartbeat
    def __init__(self, open: _Optional[_Union[OpenSessionRequest, _Mapping]] = ..., batch: _Optional[_Union[Batch, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SessionReply(_message.Message):
    __slots__ = ("opened", "result")
    OPENED_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    opened: SessionOpened
    result: BatchResult
    def __init__(self, opened: _Optional[_Union[SessionOpened, _Mapping]] = ..., result: _Optional[_Union[BatchResult, _Mapping]] = ...) -> None: ...

class OpenSessionRequest(_message.Message):
    __slots__ = ("holder", "resume", "last_result_batch_seq", "holder_address")
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    LAST_RESULT_BATCH_SEQ_FIELD_NUMBER: _ClassVar[int]
    HOLDER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    holder: str
    resume: _types_pb2.Fence
    last_result_batch_seq: int
    holder_address: str
    def __init__(self, holder: _Optional[str] = ..., resume: _Optional[_Union[_types_pb2.Fence, _Mapping]] = ..., last_result_batch_seq: _Optional[int] = ..., holder_address: _Optional[str] = ...) -> None: ...

class SessionOpened(_message.Message):
    __slots__ = ("fence", "next_batch_seq", "lease_ttl_ms", "geometry", "max_ops_per_batch", "last_step_id", "mutations_open")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    NEXT_BATCH_SEQ_FIELD_NUMBER: _ClassVar[int]
    LEASE_TTL_MS_FIELD_NUMBER: _ClassVar[int]
    GEOMETRY_FIELD_NUMBER: _ClassVar[int]
    MAX_OPS_PER_BATCH_FIELD_NUMBER: _ClassVar[int]
    LAST_STEP_ID_FIELD_NUMBER: _ClassVar[int]
    MUTATIONS_OPEN_FIELD_NUMBER: _ClassVar[int]
    fence: _types_pb2.Fence
    next_batch_seq: int
    lease_ttl_ms: int
    geometry: _types_pb2.PoolGeometry
    max_ops_per_batch: int
    last_step_id: int
    mutations_open: bool
    def __init__(self, fence: _Optional[_Union[_types_pb2.Fence, _Mapping]] = ..., next_batch_seq: _Optional[int] = ..., lease_ttl_ms: _Optional[int] = ..., geometry: _Optional[_Union[_types_pb2.PoolGeometry, _Mapping]] = ..., max_ops_per_batch: _Optional[int] = ..., last_step_id: _Optional[int] = ..., mutations_open: _Optional[bool] = ...) -> None: ...

class CloseSessionRequest(_message.Message):
    __slots__ = ("fence",)
    FENCE_FIELD_NUMBER: _ClassVar[int]
    fence: _types_pb2.Fence
    def __init__(self, fence: _Optional[_Union[_types_pb2.Fence, _Mapping]] = ...) -> None: ...

class CloseSessionReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AttachPoolRequest(_message.Message):
    __slots__ = ("fence", "worker_boot_id", "geometry", "last_executed_step")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    WORKER_BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    GEOMETRY_FIELD_NUMBER: _ClassVar[int]
    LAST_EXECUTED_STEP_FIELD_NUMBER: _ClassVar[int]
    fence: _types_pb2.Fence
    worker_boot_id: str
    geometry: _types_pb2.PoolGeometry
    last_executed_step: int
    def __init__(self, fence: _Optional[_Union[_types_pb2.Fence, _Mapping]] = ..., worker_boot_id: _Optional[str] = ..., geometry: _Optional[_Union[_types_pb2.PoolGeometry, _Mapping]] = ..., last_executed_step: _Optional[int] = ...) -> None: ...

class AttachPoolReply(_message.Message):
    __slots__ = ("fence", "levels", "is_new_pool", "pending_copies", "pending_copy_sequence_ids", "pending_swap_ins", "pending_swap_outs")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    LEVELS_FIELD_NUMBER: _ClassVar[int]
    IS_NEW_POOL_FIELD_NUMBER: _ClassVar[int]
    PENDING_COPIES_FIELD_NUMBER: _ClassVar[int]
    PENDING_COPY_SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    PENDING_SWAP_INS_FIELD_NUMBER: _ClassVar[int]
    PENDING_SWAP_OUTS_FIELD_NUMBER: _ClassVar[int]
    fence: _types_pb2.Fence
    levels: _types_pb2.PoolLevels
    is_new_pool: bool
    pending_copies: _types_pb2.BlockCopies
    pending_copy_sequence_ids: bytes
    pending_swap_ins: _types_pb2.BlockCopies
    pending_swap_outs: _types_pb2.BlockCopies
    def __init__(self, fence: _Optional[_Union[_types_pb2.Fence, _Mapping]] = ..., levels: _Optional[_Union[_types_pb2.PoolLevels, _Mapping]] = ..., is_new_pool: _Optional[bool] = ..., pending_copies: _Optional[_Union[_types_pb2.BlockCopies, _Mapping]] = ..., pending_copy_sequence_ids: _Optional[bytes] = ..., pending_swap_ins: _Optional[_Union[_types_pb2.BlockCopies, _Mapping]] = ..., pending_swap_outs: _Optional[_Union[_types_pb2.BlockCopies, _Mapping]] = ...) -> None: ...

class AdoptSequencesRequest(_message.Message):
    __slots__ = ("fence",)
    FENCE_FIELD_NUMBER: _ClassVar[int]
    fence: _types_pb2.Fence
    def __init__(self, fence: _Optional[_Union[_types_pb2.Fence, _Mapping]] = ...) -> None: ...

class AdoptedRequest(_message.Message):
    __slots__ = ("request_id", "arrival_number", "num_candidates", "prompt_token_ids", "tenant", "request_spec", "request_digest", "sequences", "cache_salt")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ARRIVAL_NUMBER_FIELD_NUMBER: _ClassVar[int]
    NUM_CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_SPEC_FIELD_NUMBER: _ClassVar[int]
    REQUEST_DIGEST_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    arrival_number: int
    num_candidates: int
    prompt_token_ids: bytes
    tenant: str
    request_spec: bytes
    request_digest: bytes
    sequences: _containers.RepeatedCompositeFieldContainer[AdoptedSequence]
    cache_salt: str
    def __init__(self, request_id: _Optional[str] = ..., arrival_number: _Optional[int] = ..., num_candidates: _Optional[int] = ..., prompt_token_ids: _Optional[bytes] = ..., tenant: _Optional[str] = ..., request_spec: _Optional[bytes] = ..., request_digest: _Optional[bytes] = ..., sequences: _Optional[_Iterable[_Union[AdoptedSequence, _Mapping]]] = ..., cache_salt: _Optional[str] = ...) -> None: ...

class AdoptedSequence(_message.Message):
    __slots__ = ("sequence_id", "candidate", "status", "output_token_ids", "num_computed_tokens", "block_ids", "table_version", "finish_reason", "scheduler_state")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    CANDIDATE_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    TABLE_VERSION_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    SCHEDULER_STATE_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    candidate: int
    status: SequenceStatus
    output_token_ids: bytes
    num_computed_tokens: int
    block_ids: bytes
    table_version: int
    finish_reason: _types_pb2.FinishReason
    scheduler_state: bytes
    def __init__(self, sequence_id: _Optional[int] = ..., candidate: _Optional[int] = ..., status: _Optional[_Union[SequenceStatus, str]] = ..., output_token_ids: _Optional[bytes] = ..., num_computed_tokens: _Optional[int] = ..., block_ids: _Optional[bytes] = ..., table_version: _Optional[int] = ..., finish_reason: _Optional[_Union[_types_pb2.FinishReason, str]] = ..., scheduler_state: _Optional[bytes] = ...) -> None: ...

class Batch(_message.Message):
    __slots__ = ("fence", "batch_seq", "step", "traceparent")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    BATCH_SEQ_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    fence: _types_pb2.Fence
    batch_seq: int
    step: StepOps
    traceparent: str
    def __init__(self, fence: _Optional[_Union[_types_pb2.Fence, _Mapping]] = ..., batch_seq: _Optional[int] = ..., step: _Optional[_Union[StepOps, _Mapping]] = ..., traceparent: _Optional[str] = ...) -> None: ...

class StepOps(_message.Message):
    __slots__ = ("step_id", "acknowledged_step", "ops")
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGED_STEP_FIELD_NUMBER: _ClassVar[int]
    OPS_FIELD_NUMBER: _ClassVar[int]
    step_id: int
    acknowledged_step: int
    ops: _containers.RepeatedCompositeFieldContainer[Op]
    def __init__(self, step_id: _Optional[int] = ..., acknowledged_step: _Optional[int] = ..., ops: _Optional[_Iterable[_Union[Op, _Mapping]]] = ...) -> None: ...

class Op(_message.Message):
    __slots__ = ("arrive", "admit", "commit", "reserve", "append", "fork", "preempt", "free", "confirm", "swap_out", "swap_in")
    ARRIVE_FIELD_NUMBER: _ClassVar[int]
    ADMIT_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    RESERVE_FIELD_NUMBER: _ClassVar[int]
    APPEND_FIELD_NUMBER: _ClassVar[int]
    FORK_FIELD_NUMBER: _ClassVar[int]
    PREEMPT_FIELD_NUMBER: _ClassVar[int]
    FREE_FIELD_NUMBER: _ClassVar[int]
    CONFIRM_FIELD_NUMBER: _ClassVar[int]
    SWAP_OUT_FIELD_NUMBER: _ClassVar[int]
    SWAP_IN_FIELD_NUMBER: _ClassVar[int]
    arrive: Arrive
    admit: Admit
    commit: Commit
    reserve: Reserve
    append: Append
    fork: Fork
    preempt: Preempt
    free: Free
    confirm: Confirm
    swap_out: SwapOut
    swap_in: SwapIn
    def __init__(self, arrive: _Optional[_Union[Arrive, _Mapping]] = ..., admit: _Optional[_Union[Admit, _Mapping]] = ..., commit: _Optional[_Union[Commit, _Mapping]] = ..., reserve: _Optional[_Union[Reserve, _Mapping]] = ..., append: _Optional[_Union[Append, _Mapping]] = ..., fork: _Optional[_Union[Fork, _Mapping]] = ..., preempt: _Optional[_Union[Preempt, _Mapping]] = ..., free: _Optional[_Union[Free, _Mapping]] = ..., confirm: _Optional[_Union[Confirm, _Mapping]] = ..., swap_out: _Optional[_Union[SwapOut, _Mapping]] = ..., swap_in: _Optional[_Union[SwapIn, _Mapping]] = ...) -> None: ...

class Arrive(_message.Message):
    __slots__ = ("request_id", "prompt_token_ids", "num_candidates", "tenant", "request_spec", "request_digest", "traceparent", "candidates", "cache_salt")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_SPEC_FIELD_NUMBER: _ClassVar[int]
    REQUEST_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_candidates: int
    tenant: str
    request_spec: bytes
    request_digest: bytes
    traceparent: str
    candidates: _containers.RepeatedCompositeFieldContainer[ArrivingCandidate]
    cache_salt: str
    def __init__(self, request_id: _Optional[str] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., num_candidates: _Optional[int] = ..., tenant: _Optional[str] = ..., request_spec: _Optional[bytes] = ..., request_digest: _Optional[bytes] = ..., traceparent: _Optional[str] = ..., candidates: _Optional[_Iterable[_Union[ArrivingCandidate, _Mapping]]] = ..., cache_salt: _Optional[str] = ...) -> None: ...

class ArrivingCandidate(_message.Message):
    __slots__ = ("candidate", "output_token_ids", "finish_reason", "scheduler_state")
    CANDIDATE_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    SCHEDULER_STATE_FIELD_NUMBER: _ClassVar[int]
    candidate: int
    output_token_ids: bytes
    finish_reason: _types_pb2.FinishReason
    scheduler_state: bytes
    def __init__(self, candidate: _Optional[int] = ..., output_token_ids: _Optional[bytes] = ..., finish_reason: _Optional[_Union[_types_pb2.FinishReason, str]] = ..., scheduler_state: _Optional[bytes] = ...) -> None: ...

class Admit(_message.Message):
    __slots__ = ("members",)
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    members: _containers.RepeatedCompositeFieldContainer[AdmitMember]
    def __init__(self, members: _Optional[_Iterable[_Union[AdmitMember, _Mapping]]] = ...) -> None: ...

class AdmitMember(_message.Message):
    __slots__ = ("sequence_id", "num_slots", "share_from", "num_shared_blocks", "use_prefix_cache")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_SLOTS_FIELD_NUMBER: _ClassVar[int]
    SHARE_FROM_FIELD_NUMBER: _ClassVar[int]
    NUM_SHARED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    USE_PREFIX_CACHE_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    num_slots: int
    share_from: int
    num_shared_blocks: int
    use_prefix_cache: bool
    def __init__(self, sequence_id: _Optional[int] = ..., num_slots: _Optional[int] = ..., share_from: _Optional[int] = ..., num_shared_blocks: _Optional[int] = ..., use_prefix_cache: _Optional[bool] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("sequence_ids", "num_tokens", "token_ids", "num_computed_tokens", "states", "state_words")
    SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    STATE_WORDS_FIELD_NUMBER: _ClassVar[int]
    sequence_ids: bytes
    num_tokens: bytes
    token_ids: bytes
    num_computed_tokens: bytes
    states: _containers.RepeatedCompositeFieldContainer[SequenceState]
    state_words: bytes
    def __init__(self, sequence_ids: _Optional[bytes] = ..., num_tokens: _Optional[bytes] = ..., token_ids: _Optional[bytes] = ..., num_computed_tokens: _Optional[bytes] = ..., states: _Optional[_Iterable[_Union[SequenceState, _Mapping]]] = ..., state_words: _Optional[bytes] = ...) -> None: ...

class SequenceState(_message.Message):
    __slots__ = ("sequence_id", "scheduler_state")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    SCHEDULER_STATE_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    scheduler_state: bytes
    def __init__(self, sequence_id: _Optional[int] = ..., scheduler_state: _Optional[bytes] = ...) -> None: ...

class Reserve(_message.Message):
    __slots__ = ("sequence_ids", "num_slots", "group_sizes")
    SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_SLOTS_FIELD_NUMBER: _ClassVar[int]
    GROUP_SIZES_FIELD_NUMBER: _ClassVar[int]
    sequence_ids: bytes
    num_slots: bytes
    group_sizes: bytes
    def __init__(self, sequence_ids: _Optional[bytes] = ..., num_slots: _Optional[bytes] = ..., group_sizes: _Optional[bytes] = ...) -> None: ...

class Append(_message.Message):
    __slots__ = ("sequence_id", "token_ids")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, sequence_id: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Fork(_message.Message):
    __slots__ = ("sequence_id", "num_children", "token_ids", "state_words")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_CHILDREN_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    STATE_WORDS_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    num_children: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    state_words: bytes
    def __init__(self, sequence_id: _Optional[int] = ..., num_children: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., state_words: _Optional[bytes] = ...) -> None: ...

class Preempt(_message.Message):
    __slots__ = ("sequence_ids",)
    SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    sequence_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, sequence_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class SwapOut(_message.Message):
    __slots__ = ("sequence_ids",)
    SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    sequence_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, sequence_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class SwapIn(_message.Message):
    __slots__ = ("members",)
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    members: _containers.RepeatedCompositeFieldContainer[SwapInMember]
    def __init__(self, members: _Optional[_Iterable[_Union[SwapInMember, _Mapping]]] = ...) -> None: ...

class SwapInMember(_message.Message):
    __slots__ = ("sequence_id", "num_slots")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_SLOTS_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    num_slots: int
    def __init__(self, sequence_id: _Optional[int] = ..., num_slots: _Optional[int] = ...) -> None: ...

class Free(_message.Message):
    __slots__ = ("sequence_ids", "finish_reason")
    SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    sequence_ids: _containers.RepeatedScalarFieldContainer[int]
    finish_reason: _types_pb2.FinishReason
    def __init__(self, sequence_ids: _Optional[_Iterable[int]] = ..., finish_reason: _Optional[_Union[_types_pb2.FinishReason, str]] = ...) -> None: ...

class Confirm(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class OpResult(_message.Message):
    __slots__ = ("status", "message", "arrived", "admitted", "forked", "reserved", "swapped_in")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    ARRIVED_FIELD_NUMBER: _ClassVar[int]
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    FORKED_FIELD_NUMBER: _ClassVar[int]
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    SWAPPED_IN_FIELD_NUMBER: _ClassVar[int]
    status: OpStatus
    message: str
    arrived: Arrived
    admitted: Admitted
    forked: Forked
    reserved: Reserved
    swapped_in: SwappedIn
    def __init__(self, status: _Optional[_Union[OpStatus, str]] = ..., message: _Optional[str] = ..., arrived: _Optional[_Union[Arrived, _Mapping]] = ..., admitted: _Optional[_Union[Admitted, _Mapping]] = ..., forked: _Optional[_Union[Forked, _Mapping]] = ..., reserved: _Optional[_Union[Reserved, _Mapping]] = ..., swapped_in: _Optional[_Union[SwappedIn, _Mapping]] = ...) -> None: ...

class Arrived(_message.Message):
    __slots__ = ("sequence_id", "arrival_number", "candidate_sequence_ids")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    ARRIVAL_NUMBER_FIELD_NUMBER: _ClassVar[int]
    CANDIDATE_SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    arrival_number: int
    candidate_sequence_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, sequence_id: _Optional[int] = ..., arrival_number: _Optional[int] = ..., candidate_sequence_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Admitted(_message.Message):
    __slots__ = ("tables",)
    TABLES_FIELD_NUMBER: _ClassVar[int]
    tables: _containers.RepeatedCompositeFieldContainer[SequenceTable]
    def __init__(self, tables: _Optional[_Iterable[_Union[SequenceTable, _Mapping]]] = ...) -> None: ...

class SwappedIn(_message.Message):
    __slots__ = ("tables",)
    TABLES_FIELD_NUMBER: _ClassVar[int]
    tables: _containers.RepeatedCompositeFieldContainer[SequenceTable]
    def __init__(self, tables: _Optional[_Iterable[_Union[SequenceTable, _Mapping]]] = ...) -> None: ...

class SequenceTable(_message.Message):
    __slots__ = ("sequence_id", "block_ids", "table_version", "num_computed_tokens")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    TABLE_VERSION_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    block_ids: bytes
    table_version: int
    num_computed_tokens: int
    def __init__(self, sequence_id: _Optional[int] = ..., block_ids: _Optional[bytes] = ..., table_version: _Optional[int] = ..., num_computed_tokens: _Optional[int] = ...) -> None: ...

class Forked(_message.Message):
    __slots__ = ("child_sequence_ids", "block_ids", "table_version")
    CHILD_SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    TABLE_VERSION_FIELD_NUMBER: _ClassVar[int]
    child_sequence_ids: _containers.RepeatedScalarFieldContainer[int]
    block_ids: bytes
    table_version: int
    def __init__(self, child_sequence_ids: _Optional[_Iterable[int]] = ..., block_ids: _Optional[bytes] = ..., table_version: _Optional[int] = ...) -> None: ...

class Reserved(_message.Message):
    __slots__ = ("failed_groups", "quota_groups")
    FAILED_GROUPS_FIELD_NUMBER: _ClassVar[int]
    QUOTA_GROUPS_FIELD_NUMBER: _ClassVar[int]
    failed_groups: bytes
    quota_groups: bytes
    def __init__(self, failed_groups: _Optional[bytes] = ..., quota_groups: _Optional[bytes] = ...) -> None: ...

class BatchResult(_message.Message):
    __slots__ = ("batch_seq", "results", "deltas", "copies", "levels", "swap_ins", "swap_outs")
    BATCH_SEQ_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    DELTAS_FIELD_NUMBER: _ClassVar[int]
    COPIES_FIELD_NUMBER: _ClassVar[int]
    LEVELS_FIELD_NUMBER: _ClassVar[int]
    SWAP_INS_FIELD_NUMBER: _ClassVar[int]
    SWAP_OUTS_FIELD_NUMBER: _ClassVar[int]
    batch_seq: int
    results: _containers.RepeatedCompositeFieldContainer[OpResult]
    deltas: _types_pb2.TableDeltas
    copies: _types_pb2.BlockCopies
    levels: _types_pb2.PoolLevels
    swap_ins: _types_pb2.BlockCopies
    swap_outs: _types_pb2.BlockCopies
    def __init__(self, batch_seq: _Optional[int] = ..., results: _Optional[_Iterable[_Union[OpResult, _Mapping]]] = ..., deltas: _Optional[_Union[_types_pb2.TableDeltas, _Mapping]] = ..., copies: _Optional[_Union[_types_pb2.BlockCopies, _Mapping]] = ..., levels: _Optional[_Union[_types_pb2.PoolLevels, _Mapping]] = ..., swap_ins: _Optional[_Union[_types_pb2.BlockCopies, _Mapping]] = ..., swap_outs: _Optional[_Union[_types_pb2.BlockCopies, _Mapping]] = ...) -> None: ...

class GetBlockTablesRequest(_message.Message):
    __slots__ = ("sequence_ids", "request_id", "max_sequences")
    SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    sequence_ids: _containers.RepeatedScalarFieldContainer[int]
    request_id: str
    max_sequences: int
    def __init__(self, sequence_ids: _Optional[_Iterable[int]] = ..., request_id: _Optional[str] = ..., max_sequences: _Optional[int] = ...) -> None: ...

class GetBlockTablesReply(_message.Message):
    __slots__ = ("sequences", "truncated")
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    TRUNCATED_FIELD_NUMBER: _ClassVar[int]
    sequences: _containers.RepeatedCompositeFieldContainer[SequenceView]
    truncated: bool
    def __init__(self, sequences: _Optional[_Iterable[_Union[SequenceView, _Mapping]]] = ..., truncated: _Optional[bool] = ...) -> None: ...

class SequenceView(_message.Message):
    __slots__ = ("sequence_id", "request_id", "candidate", "status", "num_tokens", "num_computed_tokens", "num_prompt_tokens", "table_version", "block_ids", "ref_counts", "finish_reason")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CANDIDATE_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TABLE_VERSION_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    REF_COUNTS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    request_id: str
    candidate: int
    status: SequenceStatus
    num_tokens: int
    num_computed_tokens: int
    num_prompt_tokens: int
    table_version: int
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    ref_counts: _containers.RepeatedScalarFieldContainer[int]
    finish_reason: _types_pb2.FinishReason
    def __init__(self, sequence_id: _Optional[int] = ..., request_id: _Optional[str] = ..., candidate: _Optional[int] = ..., status: _Optional[_Union[SequenceStatus, str]] = ..., num_tokens: _Optional[int] = ..., num_computed_tokens: _Optional[int] = ..., num_prompt_tokens: _Optional[int] = ..., table_version: _Optional[int] = ..., block_ids: _Optional[_Iterable[int]] = ..., ref_counts: _Optional[_Iterable[int]] = ..., finish_reason: _Optional[_Union[_types_pb2.FinishReason, str]] = ...) -> None: ...

class ListSequencesRequest(_message.Message):
    __slots__ = ("after_sequence_id", "page_size")
    AFTER_SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    after_sequence_id: int
    page_size: int
    def __init__(self, after_sequence_id: _Optional[int] = ..., page_size: _Optional[int] = ...) -> None: ...

class ListSequencesReply(_message.Message):
    __slots__ = ("sequences", "truncated")
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    TRUNCATED_FIELD_NUMBER: _ClassVar[int]
    sequences: _containers.RepeatedCompositeFieldContainer[SequenceSummary]
    truncated: bool
    def __init__(self, sequences: _Optional[_Iterable[_Union[SequenceSummary, _Mapping]]] = ..., truncated: _Optional[bool] = ...) -> None: ...

class SequenceSummary(_message.Message):
    __slots__ = ("sequence_id", "request_id", "arrival_number", "candidate", "tenant", "status", "num_prompt_tokens", "num_tokens", "num_computed_tokens", "num_blocks", "num_shared_blocks", "finish_reason", "num_host_blocks")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ARRIVAL_NUMBER_FIELD_NUMBER: _ClassVar[int]
    CANDIDATE_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_SHARED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    NUM_HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    request_id: str
    arrival_number: int
    candidate: int
    tenant: str
    status: SequenceStatus
    num_prompt_tokens: int
    num_tokens: int
    num_computed_tokens: int
    num_blocks: int
    num_shared_blocks: int
    finish_reason: _types_pb2.FinishReason
    num_host_blocks: int
    def __init__(self, sequence_id: _Optional[int] = ..., request_id: _Optional[str] = ..., arrival_number: _Optional[int] = ..., candidate: _Optional[int] = ..., tenant: _Optional[str] = ..., status: _Optional[_Union[SequenceStatus, str]] = ..., num_prompt_tokens: _Optional[int] = ..., num_tokens: _Optional[int] = ..., num_computed_tokens: _Optional[int] = ..., num_blocks: _Optional[int] = ..., num_shared_blocks: _Optional[int] = ..., finish_reason: _Optional[_Union[_types_pb2.FinishReason, str]] = ..., num_host_blocks: _Optional[int] = ...) -> None: ...

class GetPoolStatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PoolStats(_message.Message):
    __slots__ = ("geometry", "levels", "num_requests", "num_sequences", "num_shared_blocks", "peak_in_use_blocks", "num_allocations", "num_copies_on_write", "num_preemptions", "num_batches", "kvmem_boot_id", "worker_boot_id", "holder", "holder_address", "epoch", "mutations_open", "orphaned_ms", "num_finished_sequences", "num_expired_requests", "num_pending_copies", "journal_healthy", "num_prefix_lookups", "num_prefix_hits", "num_prefix_lookup_tokens", "num_prefix_hit_tokens", "num_published", "num_evictions", "num_pins", "prefix_cache_enabled", "num_tenants", "num_swapped_out_blocks", "num_swapped_in_blocks", "last_step_id", "num_recorded_tokens")
    GEOMETRY_FIELD_NUMBER: _ClassVar[int]
    LEVELS_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    NUM_SHARED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PEAK_IN_USE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_ALLOCATIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_COPIES_ON_WRITE_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_BATCHES_FIELD_NUMBER: _ClassVar[int]
    KVMEM_BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    HOLDER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MUTATIONS_OPEN_FIELD_NUMBER: _ClassVar[int]
    ORPHANED_MS_FIELD_NUMBER: _ClassVar[int]
    NUM_FINISHED_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    NUM_EXPIRED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_PENDING_COPIES_FIELD_NUMBER: _ClassVar[int]
    JOURNAL_HEALTHY_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFIX_LOOKUPS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFIX_HITS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFIX_LOOKUP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFIX_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PUBLISHED_FIELD_NUMBER: _ClassVar[int]
    NUM_EVICTIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_PINS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_CACHE_ENABLED_FIELD_NUMBER: _ClassVar[int]
    NUM_TENANTS_FIELD_NUMBER: _ClassVar[int]
    NUM_SWAPPED_OUT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_SWAPPED_IN_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LAST_STEP_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_RECORDED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    geometry: _types_pb2.PoolGeometry
    levels: _types_pb2.PoolLevels
    num_requests: int
    num_sequences: int
    num_shared_blocks: int
    peak_in_use_blocks: int
    num_allocations: int
    num_copies_on_write: int
    num_preemptions: int
    num_batches: int
    kvmem_boot_id: str
    worker_boot_id: str
    holder: str
    holder_address: str
    epoch: int
    mutations_open: bool
    orphaned_ms: int
    num_finished_sequences: int
    num_expired_requests: int
    num_pending_copies: int
    journal_healthy: bool
    num_prefix_lookups: int
    num_prefix_hits: int
    num_prefix_lookup_tokens: int
    num_prefix_hit_tokens: int
    num_published: int
    num_evictions: int
    num_pins: int
    prefix_cache_enabled: bool
    num_tenants: int
    num_swapped_out_blocks: int
    num_swapped_in_blocks: int
    last_step_id: int
    num_recorded_tokens: int
    def __init__(self, geometry: _Optional[_Union[_types_pb2.PoolGeometry, _Mapping]] = ..., levels: _Optional[_Union[_types_pb2.PoolLevels, _Mapping]] = ..., num_requests: _Optional[int] = ..., num_sequences: _Optional[int] = ..., num_shared_blocks: _Optional[int] = ..., peak_in_use_blocks: _Optional[int] = ..., num_allocations: _Optional[int] = ..., num_copies_on_write: _Optional[int] = ..., num_preemptions: _Optional[int] = ..., num_batches: _Optional[int] = ..., kvmem_boot_id: _Optional[str] = ..., worker_boot_id: _Optional[str] = ..., holder: _Optional[str] = ..., holder_address: _Optional[str] = ..., epoch: _Optional[int] = ..., mutations_open: _Optional[bool] = ..., orphaned_ms: _Optional[int] = ..., num_finished_sequences: _Optional[int] = ..., num_expired_requests: _Optional[int] = ..., num_pending_copies: _Optional[int] = ..., journal_healthy: _Optional[bool] = ..., num_prefix_lookups: _Optional[int] = ..., num_prefix_hits: _Optional[int] = ..., num_prefix_lookup_tokens: _Optional[int] = ..., num_prefix_hit_tokens: _Optional[int] = ..., num_published: _Optional[int] = ..., num_evictions: _Optional[int] = ..., num_pins: _Optional[int] = ..., prefix_cache_enabled: _Optional[bool] = ..., num_tenants: _Optional[int] = ..., num_swapped_out_blocks: _Optional[int] = ..., num_swapped_in_blocks: _Optional[int] = ..., last_step_id: _Optional[int] = ..., num_recorded_tokens: _Optional[int] = ...) -> None: ...

class MatchPrefixRequest(_message.Message):
    __slots__ = ("tenant", "cache_salt", "token_ids")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    cache_salt: str
    token_ids: bytes
    def __init__(self, tenant: _Optional[str] = ..., cache_salt: _Optional[str] = ..., token_ids: _Optional[bytes] = ...) -> None: ...

class MatchPrefixReply(_message.Message):
    __slots__ = ("num_cached_tokens",)
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    num_cached_tokens: int
    def __init__(self, num_cached_tokens: _Optional[int] = ...) -> None: ...

class PinRequest(_message.Message):
    __slots__ = ("fence", "tenant", "cache_salt", "token_ids", "ttl_ms", "is_public")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    IS_PUBLIC_FIELD_NUMBER: _ClassVar[int]
    fence: _types_pb2.Fence
    tenant: str
    cache_salt: str
    token_ids: bytes
    ttl_ms: int
    is_public: bool
    def __init__(self, fence: _Optional[_Union[_types_pb2.Fence, _Mapping]] = ..., tenant: _Optional[str] = ..., cache_salt: _Optional[str] = ..., token_ids: _Optional[bytes] = ..., ttl_ms: _Optional[int] = ..., is_public: _Optional[bool] = ...) -> None: ...

class PinReply(_message.Message):
    __slots__ = ("pin_id", "num_pinned_tokens")
    PIN_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_PINNED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    pin_id: int
    num_pinned_tokens: int
    def __init__(self, pin_id: _Optional[int] = ..., num_pinned_tokens: _Optional[int] = ...) -> None: ...

class UnpinRequest(_message.Message):
    __slots__ = ("fence", "pin_id")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    PIN_ID_FIELD_NUMBER: _ClassVar[int]
    fence: _types_pb2.Fence
    pin_id: int
    def __init__(self, fence: _Optional[_Union[_types_pb2.Fence, _Mapping]] = ..., pin_id: _Optional[int] = ...) -> None: ...

class UnpinReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchEventsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchEvent(_message.Message):
    __slots__ = ("snapshot", "applied")
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    APPLIED_FIELD_NUMBER: _ClassVar[int]
    snapshot: GetBlockTablesReply
    applied: AppliedBatch
    def __init__(self, snapshot: _Optional[_Union[GetBlockTablesReply, _Mapping]] = ..., applied: _Optional[_Union[AppliedBatch, _Mapping]] = ...) -> None: ...

class AppliedBatch(_message.Message):
    __slots__ = ("batch_seq", "step", "result")
    BATCH_SEQ_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    batch_seq: int
    step: StepOps
    result: BatchResult
    def __init__(self, batch_seq: _Optional[int] = ..., step: _Optional[_Union[StepOps, _Mapping]] = ..., result: _Optional[_Union[BatchResult, _Mapping]] = ...) -> None: ...
