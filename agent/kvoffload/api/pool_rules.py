"""Rules of a KVOffloadPool's spec that need more than one field, as CEL: the API server refuses what cannot be.

Pure data; `pool.py` puts them into its models, and so `schema.py` into the CRD. The API server estimates the cost of
each from the bounds of the fields; what it takes for boundless, it refuses.
"""

from kvoffload.api.model import MAX_BYTE_COUNT
from kvoffload.units import WRITE_A_SUFFIX


def _bytes(field: str) -> str:
    """CEL: the exact int of a quantity field.

    A number is itself. `0.5Gi` is no integer to CEL's quantity, but its float is exact below 2^53. Written without
    `string()`, whose cost the API server takes for boundless.
    """
    quantity = f"quantity({field})"
    text = f"({quantity}.isInteger() ? {quantity}.asInteger() : int({quantity}.asApproximateFloat()))"
    return f"(type({field}) == int ? int({field}) : {text})"


def _is_whole(field: str) -> str:
    """CEL: whether the quantity is exactly that int."""
    return f"(type({field}) == int || quantity({field}).sub({_bytes(field)}).compareTo(quantity('0')) == 0)"


QUOTA_RULES: list[dict[str, str]] = [
    {
        "rule": f"!has(self.limit) || {_bytes('self.guaranteed')} <= {_bytes('self.limit')}",
        "messageExpression": "'guaranteed %s of namespace %s is more than its limit %s: raise limit or "
        "lower guaranteed'.format([self.guaranteed, self.namespace, self.limit])",
        "message": "guaranteed must not exceed limit: raise limit or lower guaranteed",
        "fieldPath": ".guaranteed",
    }
]

_IS_CAPACITY = "(type(self.capacity) == int || isQuantity(self.capacity))"


def _of_capacity(rule: str) -> str:
    """CEL: the rule, of a capacity that is a quantity at all; of another one it would fail, as one more message."""
    return f"!{_IS_CAPACITY} || ({rule})"


_PAGE = "(self.pageSize == '1Gi' ? 1073741824 : 2097152)"
_CAPACITY = _bytes("self.capacity")
_NEAREST = f"({_CAPACITY} < {_PAGE} ? 1 : {_CAPACITY} / {_PAGE})"
"""Pages just below the capacity; one where that would be none."""
_UNITS, _UNIT = "(self.pageSize == '1Gi' ? 1 : 2)", "(self.pageSize == '1Gi' ? 'Gi' : 'Mi')"
"""A page as a number and its unit."""
_GUARANTEED = f"self.quotas.map(q, {_bytes('q.guaranteed')}).sum()"

SPEC_RULES: list[dict[str, str]] = [
    {
        "rule": _IS_CAPACITY,
        "messageExpression": f"'%s is no quantity; {WRITE_A_SUFFIX}'.format([self.capacity])",
        "message": f"capacity must be a quantity; {WRITE_A_SUFFIX}",
        "fieldPath": ".capacity",
    },
    {
        # compared as a quantity: what is more than int64 has no exact int to compare
        "rule": _of_capacity(
            f"type(self.capacity) == int ? int(self.capacity) <= {MAX_BYTE_COUNT} : "
            "quantity(self.capacity).compareTo(quantity('1Ei')) <= 0"
        ),
        "messageExpression": "'%s is more than 1Ei, the most that a node can give: lower capacity'"
        ".format([self.capacity])",
        "message": "capacity must not exceed 1Ei: lower it",
        "fieldPath": ".capacity",
    },
    {
        "rule": _of_capacity(f"{_is_whole('self.capacity')} && {_CAPACITY} > 0 && {_CAPACITY} % {_PAGE} == 0"),
        # one format() of a literal: the cost of concatenating what it gives would be taken for boundless
        "messageExpression": "'%s is not a positive multiple of the page size %s: the nearest multiples are %d%s and "
        f"%d%s'.format([self.capacity, self.pageSize, {_NEAREST} * {_UNITS}, {_UNIT}, ({_NEAREST} + 1) * {_UNITS}, "
        f"{_UNIT}])",
        "message": "capacity must be a positive multiple of pageSize",
        "fieldPath": ".capacity",
    },
    {
        "rule": _of_capacity(f"{_GUARANTEED} <= {_CAPACITY}"),
        "messageExpression": f"[{_GUARANTEED}].map(g, '%d%s are guaranteed in all, the capacity is %s: raise capacity "
        "or lower guaranteed'.format([g % 1073741824 == 0 ? g / 1073741824 : g % 1048576 == 0 ? g / 1048576 : g, "
        "g % 1073741824 == 0 ? 'Gi' : g % 1048576 == 0 ? 'Mi' : ' bytes', self.capacity]))[0]",
        "message": "the sum of quotas[].guaranteed must not exceed capacity: raise capacity or lower guaranteed",
        "fieldPath": ".quotas",
    },
    {
        "rule": "self.pageSize == oldSelf.pageSize",
        "messageExpression": "'pageSize cannot be changed from ' + oldSelf.pageSize + ' to ' + self.pageSize + "
        "': make a second pool with the other page size and delete this one'",
        "message": "pageSize cannot be changed",
        "fieldPath": ".pageSize",
    },
    {
        "rule": "self.sharing == oldSelf.sharing",
        "messageExpression": "'sharing cannot be changed from ' + oldSelf.sharing + ' to ' + self.sharing + "
        "': blocks that are there would change hands; make a second pool and delete this one'",
        "message": "sharing cannot be changed",
        "fieldPath": ".sharing",
    },
]
