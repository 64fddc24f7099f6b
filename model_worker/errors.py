"""What can go wrong, by who must act.

WorkerError
├── ModelError          the model cannot be served; said in a sentence at start
│   └── UnsupportedModelError   its architecture needs what paged attention here cannot do
├── NotInvariantError   --batch-invariant on, where it cannot hold
├── NativeBuildError    C++ cannot be built here
├── PoolSizeError       the KV pool cannot be made; says the numbers
└── StepError           a step the caller got wrong; nothing of it was carried out
"""

from __future__ import annotations


class WorkerError(Exception):
    """Base of what the worker reports instead of crashing."""


class ModelError(WorkerError):
    """A model that cannot be found, fetched, converted or loaded."""


class UnsupportedModelError(ModelError):
    """A model that loads, but whose attention would be computed wrongly here."""


class NotInvariantError(WorkerError):
    """A token's logits would depend on the batch it comes in, and were asked not to."""


class NativeBuildError(WorkerError):
    """There is no compiler, or it refused the source."""


class PoolSizeError(WorkerError):
    """No KV pool of a useful size fits the memory that was given or found."""


class StepError(WorkerError):
    """A step that contradicts the contract; the mirror and the KV are as before it.

    `reason` is a key of `octavo.service.errors.REASONS`.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
