"""What a scheduler keeps with a request's record, and reads back from another's:
`scheduler_svc.convert_records` without the wire."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from typing import Any

from kvmem_svc.core.views import AdoptedRequest
from scheduler_svc.core.params import SamplingParams
from scheduler_svc.core.sequence import Request
from simulator.messages import Generate


def digest_of(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=8).digest() if content else b""


def request_of(message: Generate, params: SamplingParams) -> Request:
    """A checked request, with its spec: all that another scheduler needs beside the prompt."""
    attachment = message.attachment
    secret_digest = digest_of(attachment.secret)
    detach_ttl_ms = attachment.detach_ttl_ms if secret_digest else 0
    spec = {
        "params": asdict(params),
        "secret_digest": secret_digest.hex(),
        "detach_ttl_ms": detach_ttl_ms,
        "priority": message.priority,
    }
    content = repr((message.prompt_token_ids, message.params))
    return Request(
        message.request_id,
        message.prompt_token_ids,
        params,
        tenant=message.tenant,
        cache_salt=message.cache_salt,
        priority=message.priority,
        spec=json.dumps(spec).encode(),
        digest=digest_of(content.encode()),
        attach_secret_digest=secret_digest,
        detach_ttl_ms=detach_ttl_ms,
    )


def adopted_request(record: AdoptedRequest) -> Request:
    """The request that a record is of."""
    spec = json.loads(record.request_spec)
    fields: dict[str, Any] = {
        k: tuple(v) if isinstance(v, list) else v for k, v in spec["params"].items()
    }
    return Request(
        record.request_id,
        tuple(record.prompt_token_ids.tolist()),
        SamplingParams(**fields),
        tenant=record.tenant,
        cache_salt=record.cache_salt,
        priority=spec["priority"],
        spec=record.request_spec,
        digest=record.request_digest,
        attach_secret_digest=bytes.fromhex(spec["secret_digest"]),
        detach_ttl_ms=spec["detach_ttl_ms"],
    )
