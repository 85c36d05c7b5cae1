"""Column types that all tables share. Times are integer milliseconds (`gateway.kit.clock`)."""

from __future__ import annotations

from typing import Annotated, Any

from sqlalchemy import JSON, BigInteger, MetaData, String
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import DeclarativeBase, mapped_column

Json = JSON(none_as_null=True).with_variant(JSONB(none_as_null=True), "postgresql")
JsonObject = dict[str, Any]

Id = Annotated[str, mapped_column(String(64), primary_key=True)]
Ms = Annotated[int, mapped_column(BigInteger)]
Count = Annotated[int, mapped_column(BigInteger, default=0)]


class Base(DeclarativeBase):
    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(column_0_N_label)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {JsonObject: Json, list[Any]: Json}  # noqa: RUF012
