"""Three tenants with a key and a trained adapter each, made through the HTTP API."""

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
from stack import Stack
from tasks import TASKS, Task

ADAPTERS = Path(__file__).parent / "adapters"
COMPANIES = {"triage": "northwind", "products": "acme-catalog", "sql": "globex-data"}
INGEST_SECONDS = 120.0


class OnboardingError(Exception):
    """A tenant or adapter could not be made; the message is the server's."""


@dataclass(frozen=True)
class Customer:
    """A tenant, the key that acts for it, and the adapter it serves its task with."""

    tenant: str
    key: str
    adapter: str

    @property
    def task(self) -> Task:
        return TASKS[self.adapter]


def onboard(stack: Stack) -> list[Customer]:
    """The three customers; what an earlier run made is used again."""
    memory = stack.data / "customers.json"
    known = recall(memory)
    admin = httpx.Client(base_url=stack.url, headers=bearer(stack.admin_key), timeout=60)
    customers = []
    with admin:
        for adapter, tenant in COMPANIES.items():
            customer = known.get(adapter) or create_customer(admin, tenant, adapter)
            customers.append(customer)
            remember(memory, customers)
            ensure_adapter(stack, customer)
    return customers


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def recall(memory: Path) -> dict[str, Customer]:
    if not memory.exists():
        return {}
    return {entry["adapter"]: Customer(**entry) for entry in json.loads(memory.read_text())}


def remember(memory: Path, customers: list[Customer]) -> None:
    """Keys are shown once, so the demo keeps them; only their owner may read the file."""
    partial = memory.with_suffix(".partial")
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        json.dump([asdict(customer) for customer in customers], file, indent=2)
    partial.replace(memory)


def create_customer(admin: httpx.Client, name: str, adapter: str) -> Customer:
    found = [t for t in answer(admin.get("/v1/admin/tenants"))["data"] if t["name"] == name]
    tenant = found[0] if found else answer(admin.post("/v1/admin/tenants", json={"name": name}))
    key = answer(
        admin.post("/v1/admin/keys", json={"tenant": tenant["id"], "name": "demo"}),
    )
    return Customer(name, key["secret"], adapter)


def ensure_adapter(stack: Stack, customer: Customer) -> None:
    """Upload the adapter's folder unless it is there, and wait until it is ready to serve."""
    headers = bearer(customer.key)
    with httpx.Client(base_url=stack.url, headers=headers, timeout=60) as client:
        listed = answer(client.get("/v1/adapters"))["data"]
        adapter = next((a for a in listed if a["name"] == customer.adapter), None)
        if adapter is None:
            adapter = upload(client, customer.adapter)
        wait_until_served(client, adapter["id"])


def upload(client: httpx.Client, name: str) -> dict[str, str]:
    folder = ADAPTERS / name
    files = [
        ("files", (file, (folder / file).read_bytes()))
        for file in ("adapter_config.json", "adapter_model.safetensors")
    ]
    created: dict[str, str] = answer(
        client.post("/v1/adapters", data={"name": name}, files=files),
    )
    return created


def wait_until_served(client: httpx.Client, adapter_id: str) -> None:
    deadline = time.monotonic() + INGEST_SECONDS
    while time.monotonic() < deadline:
        newest = answer(client.get(f"/v1/adapters/{adapter_id}/revisions"))["data"][0]
        if newest["status"] == "ready":
            return
        if newest["status"] == "rejected":
            raise OnboardingError(f"adapter {adapter_id} was rejected: {newest['errors']}")
        time.sleep(0.2)
    raise OnboardingError(f"adapter {adapter_id} was not ready after {INGEST_SECONDS:.0f} s")


def answer(response: httpx.Response) -> dict:
    if response.is_error:
        raise OnboardingError(f"{response.request.url}: {response.status_code} {response.text}")
    return response.json()
