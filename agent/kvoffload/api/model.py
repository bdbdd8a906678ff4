"""Base of the API models and the field types that they share. Every process that reads our objects imports it.

Models read what the API server stores (camelCase) and ignore fields they do not know: a newer CRD beside an older
program is normal during an upgrade. They are frozen: what was observed does not change.
"""

from datetime import datetime
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, computed_field
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticCustomError

from kvoffload.errors import InvalidSpec
from kvoffload.units import QUANTITY_PATTERN, parse_quantity, round_bytes


def _camel(name: str) -> str:
    """JSON name of a Python field; Kubernetes writes the abbreviations in capitals (`podUID`, `engineID`)."""
    camel = to_camel(name)
    for short, capitals in (("Uid", "UID"), ("Id", "ID")):
        if camel.endswith(short):
            return camel[: -len(short)] + capitals
    return camel


class ApiModel(BaseModel):
    """A part of an API object."""

    model_config = ConfigDict(alias_generator=_camel, populate_by_name=True, frozen=True, extra="ignore")

    def to_manifest(self) -> dict[str, Any]:
        """As it stands in a manifest: camelCase, nothing that is None."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


class ApiObject(ApiModel):
    """What the API server keeps, as far as we look at it; `spec` and `status` are the kind's own."""

    name: str
    uid: str = ""
    generation: int = 0
    deleting: bool = False
    created_at: datetime | None = None


def read_metadata(manifest: dict[str, Any]) -> dict[str, Any]:
    """The fields of `ApiObject` in an object as the API server sends it."""
    metadata = manifest["metadata"]
    return {
        "name": metadata["name"],
        "uid": metadata.get("uid", ""),
        "generation": metadata.get("generation", 0),
        "deleting": "deletionTimestamp" in metadata,
        "created_at": metadata.get("creationTimestamp"),
    }


def _quantity(value: Any) -> Any:
    if isinstance(value, str | int | float):
        try:
            return parse_quantity(value)
        except InvalidSpec as error:
            # unlike a ValueError's, its words reach people without a prefix
            raise PydanticCustomError("quantity", "{words}", {"words": str(error)}) from error
    return value


Quantity = Annotated[
    int,
    BeforeValidator(_quantity),
    WithJsonSchema(
        {
            "x-kubernetes-int-or-string": True,
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "pattern": QUANTITY_PATTERN,
            "maxLength": 32,
        }
    ),
]
"""Bytes as a Kubernetes quantity; in Python the exact number of bytes."""

MAX_BYTE_COUNT = 2**60
"""The most bytes that an object of ours counts: 1Ei. Sums over nodes stop there."""
MAX_COUNT = 1_000_000
ByteCount = Annotated[int, Field(ge=0, le=MAX_BYTE_COUNT)]
Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]

DNS_LABEL_PATTERN = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
LABEL_KEY_PATTERN = (
    r"^([a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$"
)
LABEL_VALUE_PATTERN = r"^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$"

NamespaceName = Annotated[str, Field(pattern=DNS_LABEL_PATTERN, min_length=1, max_length=63)]
NodeName = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", min_length=1, max_length=253)]
LabelKey = Annotated[str, Field(min_length=1, max_length=317)]
LabelValue = Annotated[str, Field(pattern=LABEL_VALUE_PATTERN, max_length=63)]

Rounded = Annotated[str, Field(max_length=16)]
"""Bytes for people, as `kubectl get` shows them."""


class MemoryStatus(ApiModel):
    """What a region holds, or all of a pool's: exact in `...Bytes`, and rounded for the columns of `kubectl get`."""

    capacity_bytes: ByteCount = Field(default=0, description="capacityBytes reserved.")
    used_bytes: ByteCount = Field(default=0, description="usedBytes hold blocks.")
    free_bytes: ByteCount = Field(default=0, description="freeBytes can be stored to without evicting.")
    saved_bytes: ByteCount = Field(
        default=0, description="savedBytes is how many more bytes a plain layout would keep for the same blocks."
    )

    @computed_field(description="capacity is capacityBytes rounded, such as 256Mi.")  # type: ignore[prop-decorator]
    @property
    def capacity(self) -> Rounded:
        """`capacity_bytes` for people."""
        return round_bytes(self.capacity_bytes)

    @computed_field(description="used is usedBytes rounded, such as 12.3Gi.")  # type: ignore[prop-decorator]
    @property
    def used(self) -> Rounded:
        """`used_bytes` for people."""
        return round_bytes(self.used_bytes)

    @computed_field(description="free is freeBytes rounded.")  # type: ignore[prop-decorator]
    @property
    def free(self) -> Rounded:
        """`free_bytes` for people."""
        return round_bytes(self.free_bytes)

    @computed_field(description="saved is savedBytes rounded.")  # type: ignore[prop-decorator]
    @property
    def saved(self) -> Rounded:
        """`saved_bytes` for people."""
        return round_bytes(self.saved_bytes)
