"""All tables. Import models from here."""

from gateway.models.account import Account, Budget
from gateway.models.adapter import (
    Adapter,
    AdapterContent,
    AdapterGrant,
    AdapterRevision,
    BaseModel,
)
from gateway.models.base import Base
from gateway.models.batch import Batch, BatchModel
from gateway.models.control import Heartbeat
from gateway.models.file import File
from gateway.models.invoice import Invoice, InvoiceLine
from gateway.models.request import Request, Result
from gateway.models.system_prompt import SystemPrompt
from gateway.models.tenant import ApiKey, IdempotencyKey, Tenant
from gateway.models.usage import Price, StoragePrice, StorageRecord, UsageHour, UsageRecord
from gateway.models.webhook import (
    WebhookAttempt,
    WebhookDelivery,
    WebhookEndpoint,
    WebhookEvent,
    WebhookSecret,
)

__all__ = [
    "Account",
    "Adapter",
    "AdapterContent",
    "AdapterGrant",
    "AdapterRevision",
    "ApiKey",
    "Base",
    "BaseModel",
    "Batch",
    "BatchModel",
    "Budget",
    "File",
    "Heartbeat",
    "IdempotencyKey",
    "Invoice",
    "InvoiceLine",
    "Price",
    "Request",
    "Result",
    "StoragePrice",
    "StorageRecord",
    "SystemPrompt",
    "Tenant",
    "UsageHour",
    "UsageRecord",
    "WebhookAttempt",
    "WebhookDelivery",
    "WebhookEndpoint",
    "WebhookEvent",
    "WebhookSecret",
]
