"""Names of the control tasks: the contract between who sends and who works."""

from __future__ import annotations

VALIDATE = "batches.validate"
FINALIZE = "batches.finalize"
INGEST = "adapters.ingest"
WITHDRAW = "adapters.withdraw"
DELIVER = "webhooks.deliver"
SWEEP_BATCHES = "sweeps.batches"
SWEEP_JOBS = "sweeps.jobs"
SWEEP_ADAPTERS = "sweeps.adapters"
SWEEP_WITHDRAWN = "sweeps.withdrawn"
SWEEP_FILES = "sweeps.files"
SWEEP_WEBHOOKS = "sweeps.webhooks"
SWEEP_KEYS = "sweeps.idempotency_keys"
BILLING = "billing.close"
HEARTBEAT = "control.heartbeat"
