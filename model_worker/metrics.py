"""Where the time of steps goes, as OpenTelemetry histograms.

Names and units are those of `StepTimings`; the time between steps is recorded only of steps that
somebody waited for (see `model_worker.gaps`), so that its quantiles are of those.
"""

from __future__ import annotations

from opentelemetry.metrics import Histogram, Meter

from model_worker.step import StepOutput

# What is looked for between steps is tens of microseconds; a step takes milliseconds to seconds.
BOUNDARIES_US = (0, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6, 5e6)


class StepMetrics:
    """The histograms of one worker."""

    def __init__(self, meter: Meter) -> None:
        def histogram(name: str, description: str) -> Histogram:
            return meter.create_histogram(
                f"octavo.worker.{name}",
                unit="us",
                description=description,
                explicit_bucket_boundaries_advisory=BOUNDARIES_US,
            )

        self._step = histogram("step", "A step, from its beginning to its last draw")
        self._forward = histogram("forward", "The model's forward pass")
        self._gap = histogram("gap_between_steps", "Time between two steps while there was work")
        self._idle = histogram("idle_between_steps", "Of that, what no step was there for")

    def record(self, output: StepOutput) -> None:
        """Take one step's timings."""
        timings = output.timings
        self._step.record(timings.prepare_us + timings.forward_us + timings.sample_us)
        self._forward.record(timings.forward_us)
        if timings.gap_us:
            self._gap.record(timings.gap_us)
            self._idle.record(timings.idle_us)
