"""Tables of rows on servers: ids to rows that are made when they are first pushed, and updated by themselves.

Read in this order: `hashing` (where a row lies, and what it begins with), `index` and `store` (the rows of one server),
`initial` and `optimizers` (their first values, and how they change), `packing` and `spec` (what travels), `shard` (a
table among the shards of a server). A client's side is `aiodist.ps.table`.
"""

from aiodist.ps.rows.initial import Constant, Normal, Uniform
from aiodist.ps.rows.spec import TableSpec

__all__ = ["Constant", "Normal", "TableSpec", "Uniform"]
